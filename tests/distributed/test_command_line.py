"""The command line from end to end, with the real torchrun, on scikit-learn's digits (DESIGN §3 and §4)."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from multigpu_cli.checkpoint.manifest import find_damage
from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.monitor import journal
from tests.distributed.forked import run_forked, start_forked
from tests.distributed.launcher import SECONDS, alone, run_command, torchrun, wait_for_exit
from tests.support.run_training import fork_ranks
from train_multi_gpu import train_with_multi_gpu

SMALL: dict[str, Any] = {"multi_gpu": "ddp", "model": "mlp", "global_batch_size": 128, "epochs": 2, "log_interval": 2}
SAMPLES = 1258  # of the 1,797 digits, 10 % are for validation and 20 % for the test
LONG = SMALL | {
    "data": "tests.support.user_code:tensors",
    "model": "tests.support.user_code:net",
    "global_batch_size": 20,
    "epochs": 4000,
}
SLOW = {"OWN_PAUSE": "0.02"}


def loaders_and_a_long_tmpdir(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Flags and environment of a run whose samples come over sockets; below TMPDIR their paths would be too long."""
    temporary = folder / ("temporary-files-of-job-4711/" * 4)
    temporary.mkdir(parents=True)
    return {"data": "tests.support.user_code:Items", "num_workers": 1}, {"TMPDIR": str(temporary)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in journal.read_events(folder / "journal.jsonl") if event["event"] == kind]


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("command_line")


# -- one run of two processes, looked at from all sides


@pytest.fixture(scope="module")
def done(here: Path) -> subprocess.CompletedProcess[str]:
    """torchrun … main_multi_gpu.py --multi-gpu ddp, two epochs of the digits."""
    command = torchrun(2, "--json", "--trace-samples", save_dir="run", **SMALL)
    return run_command(command, here, PYTHONPROFILEIMPORTTIME="1")


@pytest.fixture
def run(done: subprocess.CompletedProcess[str], here: Path) -> Path:
    assert done.returncode == 0, done.stderr
    return here / "run"


def test_json_is_the_only_thing_on_stdout(done: subprocess.CompletedProcess[str], run: Path) -> None:
    assert json.loads(done.stdout) == summary_of(run)


def test_no_rank_imports_what_this_run_does_not_need(done: subprocess.CompletedProcess[str]) -> None:
    """DDP and the digits would like each rank to import these: two seconds of CPU, 140 MB."""
    told = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    imported = {line.rpartition("|")[2].strip() for line in told}
    assert imported >= {"torch.nn.parallel.distributed", "multigpu_cli.run.finalize"}
    unneeded = ("torch._dynamo.", "sympy", "sklearn", "scipy", "pandas")
    assert not [name for name in imported if name.startswith(unneeded)]


def test_the_summary_keeps_the_contract(run: Path) -> None:
    summary = summary_of(run)
    told = ("status", "strategy", "world_size", "devices", "device", "precision", "epochs", "steps", "samples")
    assert [summary[name] for name in told] == ["completed", "ddp", 2, 2, "cpu", "off", 2, 20, 2 * SAMPLES]
    assert summary["global_batch_size"] == 128
    assert set(summary["step_ms"]) == {"p50", "p95"}
    assert set(summary["final"]) >= {"train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy"}
    assert summary["best"]["epoch"] in (1, 2)
    assert len(summary["peak_memory_bytes"]) == 2
    assert summary["save_dir"] == "run"
    assert (summary["resumed_from"], summary["faults"]) == (None, [])
    assert min(summary[name] for name in ("train_seconds", "startup_seconds", "samples_per_second")) > 0
    assert sum(map(sum, summary["confusion"])) == sum(row["support"] for row in summary["per_class"]) == 359


def test_the_journal_tells_the_run(run: Path) -> None:
    lines = list(journal.read_events(run / "journal.jsonl"))
    assert all(line["time"] > 1e9 for line in lines)
    assert (lines[0]["event"], lines[-1]["event"]) == ("start", "end")
    assert lines[0]["plan"]["workers"] == 2
    assert lines[0]["plan"]["grad_accum_steps"] == 2
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(2, 21, 2))
    wanted = {
        "step",
        "epoch",
        "samples",
        "loss",
        "lr",
        "grad_norm",
        "samples_per_second",
        "data_wait_share",
        "comm_share",
    }
    assert wanted | {"memory"} <= set(events(run, "train")[0])
    evaluations = [(line["epoch"], line["split"], line["samples"]) for line in events(run, "eval")]
    assert evaluations == [(1, "val", 180), (2, "val", 180), (2, "test", 359)]
    assert [line["step"] for line in events(run, "checkpoint")] == [10, 20]
    assert {"seconds", "stall_seconds", "bytes"} <= set(events(run, "checkpoint")[0])


def test_every_epoch_trained_each_sample_exactly_once(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    for epoch in (0, 1):
        seen = [sample for line in lines[10 * epoch : 10 * epoch + 10] for sample in line["samples"]]
        assert sorted(seen) == list(range(SAMPLES))
    assert lines[0]["samples"] != lines[10]["samples"]


def test_the_fingerprint_can_be_recomputed(run: Path) -> None:
    last, best = (torch.load(run / name, weights_only=True) for name in ("last.pt", "best.pt"))
    assert fingerprint(last["model"]) == summary_of(run)["fingerprint"] == events(run, "end")[0]["fingerprint"]
    assert set(last) == set(best) == {"model", "config", "metrics"}
    assert list(last["model"]) == list(best["model"])
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in last["model"])
    assert best["config"]["model"] == "mlp"


def test_the_checkpoints_are_whole(run: Path) -> None:
    folders = sorted((run / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step_00000010", "step_00000020"]
    for folder in folders:
        names = ["best_weights.pt", "evaluation.pt", "manifest.json", "state.pt"]
        assert sorted(path.name for path in folder.iterdir()) == names
        assert find_damage(folder) is None
        manifest = json.loads((folder / "manifest.json").read_text())
        assert {"files", "step", "world_size", "versions"} <= set(manifest)


def test_tensorboard_has_its_events(run: Path) -> None:
    assert any(path.stat().st_size > 0 for path in (run / "tensorboard").rglob("events.out.tfevents.*"))


def test_config_yaml_has_the_users_settings_and_no_place(run: Path) -> None:
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert (written["epochs"], written["global_batch_size"], written["lr"]) == (2, 128, None)
    assert not {"save_dir", "resume"} & set(written)


def test_the_same_command_again_does_nothing(run: Path, here: Path) -> None:
    before = contents(run)
    command = torchrun(2, "--json", "--trace-samples", save_dir="run", **SMALL)
    again = run_forked(command, here, forked_workers=2)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == summary_of(run)
    assert contents(run) == before


def test_config_yaml_repeats_the_run_on_another_number_of_workers(run: Path, here: Path) -> None:
    again = run_forked(
        alone("--json", "--config", "run/config.yaml", "--multi-gpu", "none", "--save-dir", "again"), here
    )
    assert again.returncode == 0, again.stderr
    one, two = json.loads(again.stdout), summary_of(run)
    assert one["steps"] == two["steps"]
    assert one["final"]["train_loss"] == pytest.approx(two["final"]["train_loss"], rel=1e-3)
    old, new = (yaml.safe_load((here / name / "config.yaml").read_text()) for name in ("run", "again"))
    assert new == old | {"multi_gpu": "none"}


def test_an_explicit_difference_is_refused_once_naming_both_values(run: Path, here: Path) -> None:
    before = contents(run)
    command = torchrun(2, save_dir="run", **SMALL | {"global_batch_size": 64})
    refused = run_forked(command, here, forked_workers=2)
    assert refused.returncode == 1, "torchrun turns every code into 1"
    assert refused.stderr.count("error: --global-batch-size 64 differs from 128") >= 1
    ours = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1, "once by us; the others are in torchrun's box"
    assert contents(run) == before


# -- stopped, killed, locked: one long run


def waiting(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def checkpoints(folder: Path) -> list[int]:
    return [line["step"] for line in events(folder, "checkpoint")] if (folder / "journal.jsonl").exists() else []


@pytest.fixture
def process() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test has started; none outlives it."""
    running: list[subprocess.Popen[str]] = []
    yield running
    for each in running:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
        wait_for_exit(each)


def test_locked_stopped_resumed_killed_and_resumed_elsewhere(
    tmp_path: Path, process: list[subprocess.Popen[str]]
) -> None:
    run, flags = tmp_path / "run", LONG | {"save_dir": "run", "checkpoint_every": 10}
    first = start_forked(torchrun(2, **flags), tmp_path, forked_workers=2, **SLOW)
    process.append(first)
    waiting(lambda: len(checkpoints(run)) >= 2, first)

    second = run_forked(alone(**flags | {"multi_gpu": "none"}), tmp_path, **SLOW)
    assert second.returncode == 2
    assert "another run is using run" in second.stderr
    assert first.poll() is None, "the first goes on"

    os.kill(first.pid, signal.SIGTERM)
    ended = wait_for_exit(first)
    assert ended.returncode == 1
    stopped = summary_of(run)
    assert stopped["status"] == "stopped"
    assert json.loads((run / f"checkpoints/step_{stopped['steps']:08d}/manifest.json").read_text())["world_size"] == 2
    assert events(run, "end")[-1]["status"] == "stopped"

    third = start_forked(torchrun(3, **flags), tmp_path, forked_workers=3, **SLOW)
    process.append(third)
    waiting(lambda: checkpoints(run)[-1] >= stopped["steps"] + 20, third)
    assert events(run, "resume")[-1]["step"] == stopped["steps"]
    assert (events(run, "resume")[-1]["from_world_size"], events(run, "resume")[-1]["world_size"]) == (2, 3)
    third.kill()  # the agent alone: its workers must not train on
    wait_for_exit(third)

    more = run_forked(alone("--json", **flags | {"multi_gpu": "none", "max_steps": checkpoints(run)[-1] + 5}), tmp_path)
    assert more.returncode == 0, more.stderr
    last = json.loads(more.stdout)
    assert last["status"] == "completed"
    assert last["steps"] == checkpoints(run)[-1]
    assert events(run, "resume")[-1]["from_world_size"] == 3
    assert last["train_seconds"] > stopped["train_seconds"], "totals over all attempts"


def test_a_run_without_torchrun_launches_itself_and_stops_with_75(
    tmp_path: Path, process: list[subprocess.Popen[str]]
) -> None:
    run, flags = tmp_path / "run", LONG | {"save_dir": "run", "checkpoint_every": 10, "max_restarts": 1}
    first = start_forked(alone(nproc_per_node=2, **flags), tmp_path, forked_workers=2, **SLOW)
    process.append(first)
    waiting(lambda: len(checkpoints(run)) >= 1, first)
    os.kill(first.pid, signal.SIGTERM)
    ended = wait_for_exit(first)
    assert ended.returncode == 75, ended.stderr
    assert summary_of(run)["status"] == "stopped"
    assert summary_of(run)["world_size"] == 2
    assert "Traceback" not in ended.stderr
    assert len(events(run, "start")) == 1, "a stop is no reason for another attempt"

    command = alone("--json", nproc_per_node=2, max_steps=checkpoints(run)[-1] + 5, **flags)
    again = run_forked(command, tmp_path, forked_workers=2)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["status"] == "completed"
    assert json.loads(again.stdout)["resumed_from"].endswith(f"step_{events(run, 'resume')[-1]['step']:08d}")


@pytest.mark.slow
def test_a_crash_is_survived_with_max_restarts(tmp_path: Path) -> None:
    """The second attempt goes on from the checkpoint of the first, although its peers of old are dead."""
    loaders, environ = loaders_and_a_long_tmpdir(tmp_path)
    flags = LONG | {"save_dir": "run", "checkpoint_every": 5, "max_restarts": 1, "max_steps": 30} | loaders
    deed = {"OWN_DEED": "1:23:SIGKILL", **SLOW, **environ}  # once only: the second attempt needs fewer passes
    ended = run_command(alone("--json", nproc_per_node=2, **flags), tmp_path, **deed)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert (summary["status"], summary["steps"]) == ("completed", 30)
    assert len(events(tmp_path / "run", "start")) == 2
    [restart] = [fault for fault in events(tmp_path / "run", "fault") if fault["kind"] == "restart"]
    assert "rank 1 ended without an error message after step" in restart["action"]
    assert "rank 1 ended without an error message" in ended.stderr
    assert "its last output (run/logs/rank_1.log):\n  rank 1 does it\n" in ended.stderr


@pytest.mark.slow
def test_out_of_memory_on_one_rank_amid_the_run_costs_a_restart_and_nothing_else(tmp_path: Path) -> None:
    """In backward of one rank, in a step that others have begun to reduce: half the micro-batch, the same curve."""
    flags: dict[str, Any] = LONG | {
        "model": "tests.support.oom_model:net",
        "max_steps": 12,
        "checkpoint_every": 4,
        "set": [],
    }
    quiet = {"multi_gpu": "ddp", "nproc_per_node": 2, "global_batch_size": 16, "batch_size": 8, "log_interval": 1}
    whole = run_command(alone("--json", **flags | quiet | {"save_dir": "whole"}), tmp_path)
    greedy = [f"model.args.{word}" for word in ("limit=4", "after=9", "rank=1", "backward=true")]
    ended = run_command(alone("--json", **flags | quiet | {"save_dir": "run", "set": greedy}), tmp_path)
    assert whole.returncode == ended.returncode == 0, ended.stderr
    assert "rank 1 ran out of memory" in ended.stderr
    assert "micro-batches of 4" in ended.stderr
    curves = []
    for run in ("whole", "run"):
        last = {line["step"]: line["loss"] for line in events(tmp_path / run, "train")}
        curves.append([last[step] for step in range(1, 13)])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


@pytest.mark.slow
def test_the_same_failure_at_the_same_step_twice_is_not_tried_again(tmp_path: Path) -> None:
    """Without a checkpoint in between, the second attempt fails where the first did; torchrun's box ends with why."""
    loaders, environ = loaders_and_a_long_tmpdir(tmp_path)
    flags: dict[str, Any] = {"model": "tests.support.failing_model:net", "save_dir": "run"} | loaders
    ended = run_command(torchrun(2, restarts=3, checkpoint_every=1000, **flags), tmp_path, **environ)
    assert ended.returncode == 1
    run = tmp_path / "run"
    assert len(events(run, "start")) == 2, "attempts 3 and 4 ended before they touched anything"
    box = ended.stderr[ended.stderr.index("Root Cause") :]
    assert "ValueError: the planted fault" in ended.stderr
    assert "the planted fault" in box
    assert "closed by peer" not in ended.stderr, "an innocent rank's error is not shown as a cause"
    assert "rank 1 failed (forward, 3 steps done): ValueError: the planted fault" in summary_of(run)["error"]
    assert sorted(file.name for file in (run / "logs").iterdir()) == [
        *("crash_0.txt", "crash_1.txt", "rank_1.log", "state.json")
    ]
    log = (run / "logs" / "rank_1.log").read_text()
    assert (log.count("--- rank 1, attempt 1, "), log.count("--- rank 1, attempt 2, ")) == (1, 1)


def test_a_wrong_request_of_a_self_launch_is_told_once(tmp_path: Path) -> None:
    command = alone(nproc_per_node=2, multi_gpu="ddp", data="har", save_dir="run")
    refused = run_forked(command, tmp_path, forked_workers=2)
    assert refused.returncode == 2
    assert refused.stderr.count("har") >= 1
    assert "Traceback" not in refused.stderr
    assert refused.stderr.count("--data-dir") <= 2
    assert not (tmp_path / "run").exists()


def train_and_look_for_gloo(rank: int) -> None:
    """As a script under torchrun; the exit code tells whether there is a thread of gloo, by the kernel's name."""
    model = nn.Linear(3, 2)
    loader = DataLoader(TensorDataset(torch.ones(8, 3), torch.arange(8) % 2), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_with_multi_gpu(model, loader, optimizer, num_epochs=1, global_batch_size=4, save_dir="run")
    names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    os._exit(any("gloo" in name for name in names))


def test_a_script_has_no_thread_of_gloo_left_after_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs at Python's exit is what now and then aborts it."""
    monkeypatch.chdir(tmp_path)
    fork_ranks(2, train_and_look_for_gloo, SECONDS)
    assert Path("run/summary.json").is_file()
