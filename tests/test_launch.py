import json
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from multigpu_cli import launch
from multigpu_cli.checkpoint.run_folder import write_note
from multigpu_cli.config import rules
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.errors import RequestError
from multigpu_cli.faults.stop import interruptible
from multigpu_cli.launch import WorkersFailed, run_cli, run_in_workers, self_launch
from multigpu_cli.monitor.journal import Journal, read_events
from tests.support.fork import exit_code

CPU, CUDA = torch.device("cpu"), (torch.device("cuda", 1), torch.device("cuda", 3))
ON_CPU = Placement("ddp", (CPU,) * 2, 2, "a test")
ON_GPUS = Placement("ddp", CUDA, 2, "a test")


class Agent:
    """Stands in for torch's elastic agent: notes what it is asked to do, and ends as told."""

    def __init__(self, ending: Callable[[], Any] = lambda: None) -> None:
        self.ending = ending

    def __call__(self, config: Any, entrypoint: str) -> "Agent":
        self.config, self.entrypoint = config, entrypoint
        return self

    def run(self, *words: str) -> Any:
        self.words, self.visible = words, os.environ.get("CUDA_VISIBLE_DEVICES")
        self.request = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
        return self.ending()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Agent:
    monkeypatch.chdir(tmp_path)
    stand_in = Agent()
    monkeypatch.setattr(launch, "elastic_launch", lambda config, entry: stand_in(config, entry).run)
    return stand_in


def make_config(**flags: Any) -> Config:
    return resolve(flags, [], None)


def leave_summary(status: str) -> Callable[[], None]:
    """Workers that leave a summary in the folder `run`."""

    def end() -> None:
        Path("run").mkdir(exist_ok=True)
        Path("run/summary.json").write_text(json.dumps({"status": status}))

    return end


def test_the_workers_get_the_front_door_and_the_explicit_settings(agent: Agent) -> None:
    agent.ending = leave_summary("completed")
    assert self_launch(make_config(save_dir="run", lr=0.5, epochs=3), ON_CPU, "json") == {"status": "completed"}
    assert Path(agent.words[0]).name == "main_multi_gpu.py"
    assert "--json" in agent.words
    assert agent.request == {"save_dir": "run", "resume": "auto", "lr": 0.5, "epochs": 3, "from_files": ""} | {
        key: value for key, value in agent.request.items() if value is None
    }


def test_all_attempts_mean_the_same_new_folder(agent: Agent) -> None:
    self_launch(make_config(), ON_CPU, "normal")
    first = agent.request["save_dir"]
    self_launch(make_config(), ON_CPU, "normal")
    assert first.startswith("checkpoints/digits/")
    assert agent.request["save_dir"] != first
    assert not {"--json", "--quiet", "--verbose"} & set(agent.words)


def test_never_is_settled_here_and_not_said_again_to_a_restarted_worker(agent: Agent) -> None:
    self_launch(make_config(resume="never", save_dir="run"), ON_CPU, "normal")
    assert agent.request["resume"] == "auto"


def test_the_agent_is_told_how_many_and_that_they_are_ours(agent: Agent) -> None:
    self_launch(make_config(max_restarts=3), ON_CPU, "normal")
    config = agent.config
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 1, 2, 3)
    assert config.rdzv_endpoint == "localhost:0", "a free port"
    assert rules.is_self_launched({"TORCHELASTIC_RUN_ID": config.run_id})
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        assert name in config.signals_to_handle


def test_a_signal_that_nohup_ignores_is_left_to_it(agent: Agent) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        self_launch(make_config(), ON_CPU, "normal")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "SIGHUP" not in agent.config.signals_to_handle
    assert "SIGTERM" in agent.config.signals_to_handle


@pytest.mark.parametrize(
    ("before", "inside"), [(None, "1,3"), ("4,5,6,7", "5,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-b,GPU-d")]
)
def test_workers_see_only_the_chosen_gpus(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, before: str | None, inside: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    self_launch(make_config(), ON_GPUS, "normal")
    assert agent.visible == inside
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before, "as it was, for whoever goes on in this process"


def fail_workers(*ends: tuple[int, int], silent: Collection[int] = ()) -> Callable[[], None]:
    """Workers that ended with these exit codes at these seconds; those that no signal ended have said why, or not."""

    def end() -> None:
        failures = {}
        for rank, (code, second) in enumerate(ends):
            told = Path(f"told_{rank}.json")
            told.write_text('{"message": "what it has shown"}')
            error_file = str(told) if code > 0 and rank not in silent else ""
            failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=error_file)
            failures[rank].timestamp = second
        raise ChildFailedError("main_multi_gpu.py", failures)

    return end


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([(2, 1), (-15, 3)], 2),
        ([(-15, 1), (75, 3)], 75),  # the agent's own SIGTERM is never the first, whatever the clocks say
        ([(75, 1), (75, 1)], 75),
        ([(1, 1)], 1),
    ],
)
def test_the_code_of_the_first_that_ended_is_ours(agent: Agent, ends: list[tuple[int, int]], code: int) -> None:
    agent.ending = fail_workers(*ends)
    with pytest.raises(WorkersFailed) as ended:
        self_launch(make_config(), ON_CPU, "normal")
    assert ended.value.exit_code == code
    assert str(ended.value) == "", "they have told the user why"


@pytest.mark.parametrize(
    ("ends", "code", "problem"),
    [
        ([(-15, 3), (-9, 1)], 1, "rank 1 was killed (SIGKILL)"),
        ([(-15, 3), (-6, 1)], 1, "rank 1 was killed (SIGABRT)"),
        ([(1, 3), (7, 1)], 7, "rank 1 ended without an error message"),
    ],
)
@pytest.mark.parametrize(("step", "when"), [(None, ""), (0, " before the first step"), (12, " after step 12")])
def test_launcher_reports_a_killed_worker_and_journals_it(
    agent: Agent, ends: list[tuple[int, int]], code: int, problem: str, step: int | None, when: str
) -> None:
    """With the last lines that it printed, which no other rank shows."""

    def end() -> None:
        Path("run/logs").mkdir(parents=True)
        Path("run/logs/rank_1.log").write_text("--- rank 1, attempt 1\nterminate called\n")
        Path("run/logs/crash_0.txt").touch()
        if step is not None:
            with closing(Journal("run/journal.jsonl")) as journal:
                journal.write("start", plan={})
                journal.write("end", status="failed", step=step, fingerprint=None, cause="rank 1 is missing", rank=1)
        fail_workers(*ends, silent=[1])()

    agent.ending = end
    with pytest.raises(WorkersFailed) as ended:
        self_launch(make_config(save_dir="run"), ON_CPU, "normal")
    assert ended.value.exit_code == code
    assert ended.value.problem == f"{problem}{when}\n  its last output (run/logs/rank_1.log):\n  terminate called"
    if step is not None:
        last = list(read_events("run/journal.jsonl"))[-1]
        del last["time"]
        assert last == {
            "event": "end", "status": "failed", "step": step, "fingerprint": None, "cause": problem, "rank": 1,
        }  # fmt: skip


def test_launcher_leaves_the_journal_of_an_earlier_launch_alone(agent: Agent) -> None:
    Path("run").mkdir()
    before = '{"event": "start", "time": 1.0}\n'
    Path("run/journal.jsonl").write_text(before)
    agent.ending = fail_workers((-9, 1))
    with pytest.raises(WorkersFailed) as ended:
        self_launch(make_config(save_dir="run"), ON_CPU, "normal")
    assert ended.value.problem == "rank 0 was killed (SIGKILL)"
    assert Path("run/journal.jsonl").read_text() == before


def interrupt_after(status: str) -> Callable[[], None]:
    def end() -> None:
        leave_summary(status)()
        raise SignalException("told to stop", signal.SIGTERM)

    return end


def test_a_signal_that_stopped_the_workers_in_good_order_is_no_failure(agent: Agent) -> None:
    agent.ending = interrupt_after("stopped")
    assert self_launch(make_config(save_dir="run"), ON_CPU, "normal") == {"status": "stopped"}


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("completed", 128 + signal.SIGTERM)])
def test_a_signal_that_did_not_is_one(agent: Agent, status: str, code: int) -> None:
    agent.ending = interrupt_after(status)
    with pytest.raises(WorkersFailed) as ended:
        self_launch(make_config(save_dir="run"), ON_CPU, "normal")
    assert ended.value.exit_code == code


def test_a_signal_ends_a_command_whose_workers_it_ended_and_the_agent_keeps_no_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent's own, once it has started workers
        raise SignalException("told to stop", signal.SIGINT)

    monkeypatch.setattr(launch, "elastic_launch", lambda config, entry: end)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_in_workers(ON_CPU, fail_on_rank_1)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_the_process_of_an_interrupted_command_is_ended_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: str
) -> None:
    door = f"""import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open("ended", "w").close() or os._exit(75))
os.kill(os.getppid(), signal.{number})
time.sleep(60)"""
    (tmp_path / "door.py").write_text(door)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "_FRONT_DOOR", tmp_path / "door.py")
    with pytest.raises(KeyboardInterrupt), interruptible():
        run_cli([], os.environ)
    assert (tmp_path / "ended").exists()


def test_workers_that_ran_out_of_memory_are_started_again_with_smaller_micro_batches(agent: Agent) -> None:
    """Without --max-restarts, and only where they have left word of what to do otherwise."""
    sizes = iter([16, 8])

    def out_of_memory_twice() -> None:
        size = next(sizes, None)
        if size is None:
            return leave_summary("completed")()
        Path("run").mkdir(exist_ok=True)
        write_note(Path("run"), {"batch_size": size})
        return fail_workers((1, 1), (-15, 2))()

    agent.ending = out_of_memory_twice
    assert self_launch(make_config(save_dir="run"), ON_CPU, "normal") == {"status": "completed"}
    assert next(sizes, None) is None


def test_other_failures_beside_an_old_note_are_not(agent: Agent) -> None:
    Path("run").mkdir()
    write_note(Path("run"), {"batch_size": 8})
    agent.ending = fail_workers((1, 1), (-15, 2))
    with pytest.raises(WorkersFailed):
        self_launch(make_config(save_dir="run"), ON_CPU, "normal")


def fail_on_rank_1(met: Path) -> None:
    """Rank 0 loses its peer before that peer's error is out."""
    if os.environ["RANK"] == "0":
        while not met.exists():  # a busy machine starts the ranks seconds apart
            time.sleep(0.01)
        raise RuntimeError("[127.0.0.1]:1234: Connection closed by peer")
    met.touch()
    time.sleep(0.5)
    raise RequestError("--data nothing: planted", remedy="something")


def test_the_error_of_a_called_function_is_that_of_the_rank_at_fault(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(WorkersFailed) as failed:
        run_in_workers(ON_CPU, fail_on_rank_1, tmp_path / "met")
    assert str(failed.value) == "rank 1: --data nothing: planted\n  try: something"
    assert failed.value.exit_code == 2
    assert "planted" not in capfd.readouterr().err, "whoever started them says it, once"


def fail_in_user_code() -> None:
    json.loads("no number")


def test_an_error_that_nobody_has_foreseen_is_left_with_the_line_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    starter = os.getpid()
    assert exit_code(lambda: launch._call_in_worker(starter, fail_in_user_code)) == 1
    left = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert left.startswith("training failed: JSONDecodeError: Expecting value")
    assert f'{__file__}:{fail_in_user_code.__code__.co_firstlineno + 1} fail_in_user_code: json.loads("no' in left


def test_a_worker_whose_starter_has_gone_meanwhile_does_no_work(tmp_path: Path) -> None:
    """It would go on beside whatever is started next: loading torch takes seconds in which nobody watches."""
    gone, work = os.getppid(), (tmp_path / "worked").touch
    assert exit_code(lambda: launch._call_in_worker(gone, work)) == 1
    assert not (tmp_path / "worked").exists()
