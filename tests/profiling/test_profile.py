"""`multigpu profile RUN`: of a training at work, without an effect on it; and every run that can't be profiled."""

import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._autograd import DeviceType

import main_multi_gpu
from multigpu_cli import engine
from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.faults import stop
from multigpu_cli.monitor import run_state
from multigpu_cli.monitor.journal import read_events, read_json
from multigpu_cli.monitor.run_state import REQUEST, STATE
from multigpu_cli.profiling import command
from multigpu_cli.profiling.command import format_profile, profile_run
from multigpu_cli.profiling.profiler import list_operators
from tests.support.run_training import run_training
from tests.support.wait_until import wait_until

_STEPS = 8


def ask_at_step_two(folder: Path, steps: int, *, signal_at: int = -1) -> Callable[[], None]:
    """What each rank does before it trains: rank 0 asks from a thread, as the command does, once two steps are done.

    The ranks vote after each step. What the command returns, or raises, is in answer.json before the run ends.

    Args:
        signal_at: rank 0 gets SIGTERM before this step, counted from 0.
    """

    def work() -> None:
        try:
            answer: Any = profile_run(str(folder), steps)
        except TrainingError as error:
            answer = {"error": str(error)}
        (folder / "answer.json").write_text(json.dumps(answer))

    def prepare() -> None:
        run_state._INTERVAL, stop._INTERVAL, train_step = 0.01, 0.0, engine.train_step
        asking = threading.Thread(target=work, daemon=True)

        def step(run: Any, layout: Any, batches: Any) -> Any:
            if run.world.is_main and layout.step == 2:
                wait_until((folder / STATE).exists, "the state")
                asking.start()
                wait_until(lambda: run.log.state.asked, "a request that is seen")
            if run.world.is_main and layout.step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            done = train_step(run, layout, batches)
            if run.world.is_main and layout.step == _STEPS - 1:
                asking.join()
                assert not run.moments.step_end, "the part has taken itself out"
            return done

        engine.train_step = step  # type: ignore[assignment]

    return prepare


TWO: dict[str, Any] = {"multi_gpu": "ddp", "max_steps": _STEPS, "batch_size": 8}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bits of a run that nobody profiles."""
    ended = run_training(2, save_dir=str(tmp_path_factory.mktemp("plain")), **TWO)
    return f"{ended.error}{ended.summary['fingerprint']}"


@pytest.mark.parametrize("steps", [3, 1000])
def test_two_workers_are_profiled_and_train_to_the_same_bits(tmp_path: Path, steps: int, plain: str) -> None:
    run = tmp_path / "run"
    profiled = run_training(2, save_dir=str(run), prepare=ask_at_step_two(run, steps), **TWO)
    assert profiled.error == ""
    assert profiled.summary["fingerprint"] == plain

    found = read_json(run / "answer.json", "profile")
    assert (found["step"], found["steps"]) == (3, min(steps, _STEPS - 3)), "no more than are left"
    of_ranks = [{row["name"]: row["calls"] for row in rank["operators"]} for rank in found["ranks"]]
    assert [calls["Optimizer.step#AdamW.step"] for calls in of_ranks] == [found["steps"]] * 2
    assert all(calls["c10d::allreduce_"] >= found["steps"] for calls in of_ranks)
    with gzip.open(found["trace"], "rt") as trace:
        assert "aten::addmm" in {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert "c10d::allreduce_" in (text := "\n".join(format_profile(found)))
    assert found["trace"] in text
    first, second = (f"rank {number} {rank['seconds']:.2f} s" for number, rank in enumerate(found["ranks"]))
    assert text.startswith(
        f"{found['steps']} steps after step 3, from the profiler's start: {first}, {second}; profilers"
    )
    (event,) = [event for event in read_events(run / "journal.jsonl") if event["event"] == "profile"]
    assert (event["step"], event["steps"]) == (3, found["steps"])
    assert not (run / REQUEST).exists()


def test_a_run_that_is_stopped_meanwhile_says_so(tmp_path: Path) -> None:
    prepare = ask_at_step_two(tmp_path, 8, signal_at=5)
    ended = run_training(1, save_dir=str(tmp_path), max_steps=_STEPS, batch_size=8, prepare=prepare)
    assert ended.summary["status"] == "stopped"
    assert not (tmp_path / REQUEST).exists()
    assert not list(tmp_path.glob("logs/*.gz"))


def test_requests_that_make_no_sense_are_removed(tmp_path: Path) -> None:
    mark = "0" * 32
    words = {2: f"os.system 3 {mark}", 4: f"profile many {mark}", 6: "profile 3", 8: f"profile {'9' * 5000} {mark}"}
    words |= {
        10: f"profile 1001 {mark}",
        12: f"profile \u0663 {mark}",
        14: "profile 3 ../../x",
        16: f"profile 0 {mark}",
    }

    def prepare() -> None:
        run_state._INTERVAL, train_step = 0.01, engine.train_step

        def step(run: Any, layout: Any, batches: Any) -> Any:
            if layout.step in words:
                (tmp_path / REQUEST).write_text(words[layout.step])
                wait_until(lambda: run.log.state.asked, "a request that is seen")
            assert layout.step - 1 not in words or not (tmp_path / REQUEST).exists()
            return train_step(run, layout, batches)

        engine.train_step = step  # type: ignore[assignment]

    assert run_training(1, save_dir=str(tmp_path), max_steps=18, batch_size=8, prepare=prepare).error == ""
    assert not any(event["event"] == "profile" for event in read_events(tmp_path / "journal.jsonl"))


@pytest.mark.filterwarnings("ignore:.* damaged, and not used")
@pytest.mark.parametrize("ranks", [[], [{"seconds": "x"}], [{"seconds": 1, "operators": [{"name": 3}]}]])
def test_an_answer_of_another_form_is_none(ranks: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "journal.jsonl", {})
    put(tmp_path, STATE, {"time": time.time(), "host": os.uname().nodename, "pid": os.getpid()})
    monkeypatch.setattr(command, "uuid4", lambda: SimpleNamespace(hex="ab"))
    answer = {"id": "ab", "step": 1, "steps": 2, "trace": "logs/trace", "ranks": ranks}
    put(tmp_path, "logs/profile_00000001.json", answer)
    with lock_folder(tmp_path):
        removing = threading.Thread(
            target=lambda: [wait_until((tmp_path / REQUEST).exists, "a request"), remove(tmp_path)]
        )
        removing.start()
        with pytest.raises(TrainingError, match="or could not write"):
            profile_run(str(tmp_path), 20)
        removing.join()


def remove(run: Path) -> None:
    (run / REQUEST).unlink()


def put(run: Path, name: str, content: object) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(json.dumps(content))


def test_what_can_not_be_profiled_is_refused_in_one_message(tmp_path: Path) -> None:
    run, here = tmp_path / "run", os.uname().nodename

    def refusal() -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(RequestError) as refused:
            profile_run(str(run), 20)
        assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
        return str(refused.value)

    assert "not a run folder" in refusal()
    put(run, "journal.jsonl", {})
    assert "is not running" in refusal()
    with lock_folder(run):
        assert "is starting" in refusal()
        put(run, STATE, {"time": time.time(), "host": here, "pid": os.getpid(), "phase": "training"})
        put(run, REQUEST, {})
        assert "profiled already" in refusal()
        (run / REQUEST).unlink()
        (run / ".lock").write_text("elsewhere 7")
        assert "another host, elsewhere" in refusal()
        put(run, "summary.json", {"status": "completed"})
        assert "has ended (completed)" in refusal()


def test_a_run_that_dies_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    put(tmp_path, "journal.jsonl", {})
    put(tmp_path, STATE, {"time": time.time(), "host": os.uname().nodename, "pid": os.getpid()})
    with lock_folder(tmp_path):
        answers: list[str] = []

        def ask() -> None:
            try:
                profile_run(str(tmp_path), 20)
            except TrainingError as error:
                answers.append(str(error))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until((tmp_path / REQUEST).exists, "a request")
    asking.join()
    assert "has ended" in answers[0]
    assert not (tmp_path / REQUEST).exists(), "the next attempt is not profiled"


def test_steps_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["profile", "run", "--steps", "0"]) == 2
    assert "--steps" in capsys.readouterr().err


def test_a_kernel_counts_once_as_its_operators_time() -> None:
    """A profile on a GPU has a row for the operator, one for its kernel, and one for an annotation over both."""

    def row(name: str, device: DeviceType, host: int, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(
            key=name, device_type=device, count=1, self_cpu_time_total=host, self_device_time_total=gpu
        )

    annotation = row("Optimizer.step#AdamW.step", DeviceType.CUDA, 0, 9000)
    rows = [row("aten::mm", DeviceType.CPU, 40, 3000), row("gemm", DeviceType.CUDA, 0, 3000), annotation]
    assert list_operators(rows) == [{"name": "aten::mm", "calls": 1, "host_ms": 0.04, "gpu_ms": 3.0}]
