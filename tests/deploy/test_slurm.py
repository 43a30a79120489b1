"""deploy/slurm.sbatch with stand-ins for SLURM's commands on the PATH."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.launcher import options

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm.sbatch"
STAND_INS = {
    "scontrol": """echo "scontrol $*" >> "$CALLS"
        case "$2" in hostnames) printf 'alpha07\\nalpha08\\n';; job) echo "   $JOB";; esac""",
    "srun": 'echo "srun $*" >> "$CALLS"; shift; trap : TERM; trap "kill -USR1 \\$job" USR1; "$@" & job=$!; '
    'touch "$CALLS.listens"; '
    "while true; do wait $job; code=$?; kill -0 $job 2>/dev/null || exit $code; done",
    "python": 'echo "python $*" >> "$CALLS"; eval "$TRAINER"',
}
Job = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Starts the script as SLURM would; `trainer` is what the agent does, in shell."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, does in STAND_INS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (tools / name).chmod(0o755)

    def start(
        *words: str, trainer: str = "exit 0", environ: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        given = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "alpha[07-08]"}
        given |= {"PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "TRAINER": trainer}
        given["JOB"] = "PreemptEligibleTime=2026-11-22T10:36:26 PreemptTime=None"
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *words],
            env=os.environ | given | dict(environ or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    started: list[subprocess.Popen[str]] = []
    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with process:  # closes its pipes
            process.wait()


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []


def test_the_nodes_meet_at_the_first_one_and_the_trainer_gets_its_words(job: Job, tmp_path: Path) -> None:
    done = job("--config", "har", "--save-dir", "my runs/har")
    assert (done.wait(20), done.communicate()[1]) == (0, "")
    show, srun, agent = calls(tmp_path)
    assert show == "scontrol show hostnames alpha[07-08]"
    assert "--nnodes=2 --nproc-per-node=gpu --rdzv-id=4711" in agent
    assert "--rdzv-endpoint=alpha07:24711" in agent
    assert agent.endswith("-m main_multi_gpu --config har --save-dir my runs/har")
    assert srun.startswith("srun --kill-on-bad-exit=1 python -m multigpu_cli.distributed.torchrun")


def test_srun_gets_the_cores_of_the_job(job: Job, tmp_path: Path) -> None:
    """It does not inherit them; where the job names none, SLURM's own default holds."""
    for cores in ("32", ""):
        environ = {"SLURM_CPUS_PER_TASK": cores} if cores else {}
        job("--save-dir", "run", trainer='echo "cores ${SRUN_CPUS_PER_TASK-}" >> "$CALLS"', environ=environ).wait(20)
        assert calls(tmp_path)[-1] == f"cores {cores}"


SAVES = (
    'trap "sleep 0.3; echo saved >> $CALLS; exit 75" USR1 TERM; echo begun >> "$CALLS"; while true; do sleep 0.05; done'
)
"""A trainer that takes a moment to save."""


def listens(running: "subprocess.Popen[str]") -> bool:
    """Whether the script has its traps."""
    status = Path(f"/proc/{running.pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return all(caught >> number - 1 & 1 for number in (signal.SIGUSR1, signal.SIGTERM))


def tell(running: "subprocess.Popen[str]", tmp_path: Path, *numbers: signal.Signals) -> None:
    """Signals to the script of a job that trains, and to its workers, as far as SLURM tells them."""
    until = time.monotonic() + 20
    while not (listens(running) and (tmp_path / "calls.listens").exists() and "begun" in calls(tmp_path)):
        assert time.monotonic() < until, running.poll()
        time.sleep(0.02)
    for number in numbers:
        (running.send_signal if number == signal.SIGUSR1 else partial(os.killpg, running.pid))(number)


def test_at_the_time_limit_it_saves_and_is_queued_again(job: Job, tmp_path: Path) -> None:
    running = job("--save-dir", "run", trainer=SAVES)
    tell(running, tmp_path, signal.SIGUSR1)
    assert running.wait(20) == 0
    assert calls(tmp_path)[-2:] == ["saved", "scontrol requeue 4711"]
    assert running.communicate()[0] == "stopped with a checkpoint; job 4711 is queued again\n"


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM]])
def test_cancelled_it_saves_and_stays_away(job: Job, tmp_path: Path, numbers: list[signal.Signals]) -> None:
    """Also where somebody cancels a job that has been told to save."""
    running = job("--save-dir", "run", trainer=SAVES)
    tell(running, tmp_path, *numbers)
    assert running.wait(20) == 75
    assert "saved" in calls(tmp_path)
    assert not any("requeue" in call for call in calls(tmp_path))
    assert running.communicate()[0].startswith("stopped with a checkpoint")


def test_a_preemption_that_only_the_workers_were_told_of_is_queued_again(job: Job, tmp_path: Path) -> None:
    running = job("--save-dir", "run", trainer="exit 75", environ={"JOB": "PreemptTime=2026-11-22T10:37:09"})
    assert running.wait(20) == 0
    assert calls(tmp_path)[-1] == "scontrol requeue 4711"
    running.communicate()


def test_a_stop_without_a_checkpoint_is_not_called_one(job: Job, tmp_path: Path) -> None:
    running = job("--save-dir", "run", trainer=SAVES.replace("exit 75", "exit 138"))
    tell(running, tmp_path, signal.SIGUSR1)
    assert running.wait(20) == 0
    assert running.communicate()[0].startswith("ended with exit code 138, without a new checkpoint")
    assert calls(tmp_path)[-1] == "scontrol requeue 4711"


def test_a_failure_of_its_own_is_not_repeated(job: Job, tmp_path: Path) -> None:
    failed = job("--save-dir=run", trainer="exit 1")
    assert failed.wait(20) == 1
    failed.communicate()
    assert not any("requeue" in call for call in calls(tmp_path))


def test_without_a_save_dir_it_could_not_go_on(job: Job, tmp_path: Path) -> None:
    refused = job("--config", "har")
    assert refused.wait(20) == 2
    assert "--save-dir" in refused.communicate()[1]
    assert calls(tmp_path) == []


@pytest.mark.slow
def test_a_real_run_goes_on_where_it_stopped_and_ends_as_if_nothing_had_been(job: Job, tmp_path: Path) -> None:
    does = {"python": f'exec {sys.executable} "$@"'}
    does["scontrol"] = 'echo "scontrol $*" >> "$CALLS"; echo localhost'
    for name, code in does.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
    here = {"SLURM_JOB_NUM_NODES": "1", "MULTIGPU_PER_NODE": "2", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    here["SLURM_STEP_NUM_TASKS"] = "2"  # as srun sets it for the agent on each of two nodes
    flags = {
        "data": "tests.support.user_code:tensors",
        "model": "tests.support.user_code:net",
        "set": "guard=off",  # the network counts its passes
        "exact": True,
        "epochs": 40,
        "batch_size": 5,
    }
    words = options(flags | {"global_batch_size": 20, "log_interval": 1, "quiet": True})
    run = tmp_path / "run"
    stopped = job(*words, "--save-dir", str(run), environ=here | {"OWN_PAUSE": "0.05"})
    until = time.monotonic() + 100
    while not (run / "journal.jsonl").exists() or '"train"' not in (run / "journal.jsonl").read_text():
        assert stopped.poll() is None, stopped.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    stopped.send_signal(signal.SIGUSR1)
    assert (stopped.wait(100), calls(tmp_path)[-1]) == (0, "scontrol requeue 4711"), stopped.communicate()
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
    again = job(*words, "--save-dir", str(run), environ=here)
    whole = job(*words, "--save-dir", str(tmp_path / "whole"), environ=here | {"SLURM_JOB_ID": "4712"})
    assert (again.wait(150), whole.wait(150)) == (0, 0), again.communicate()
    ends = [json.loads((folder / "summary.json").read_text()) for folder in (run, tmp_path / "whole")]
    assert ends[0]["fingerprint"] == ends[1]["fingerprint"]
    assert ends[0]["resumed_from"] is not None
