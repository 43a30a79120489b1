import gc
import io
import json
import shutil
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock, PropertyMock, call

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from multigpu_cli import engine
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor import journal
from multigpu_cli.monitor.console import Console
from multigpu_cli.planning.batch import StepLayout
from multigpu_cli.run.finalize import finish_run
from multigpu_cli.run.open import open_run, resolve_request
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.run.run import Run
from tests.support.run_training import run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {
    "save_dir": "run", "global_batch_size": 20, "batch_size": 5, "epochs": 4, "log_interval": 1, "lr": 0.05,
}  # fmt: skip

SHORT = RUN | {"epochs": 2}
WRITTEN = {"OWN_AFTER": "run/checkpoints/step_*"}  # the kill comes after the first checkpoint


def events(kind: str, folder: str = "run") -> list[dict[str, Any]]:
    return [event for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] == kind]


def curve(folder: str = "run") -> dict[int, float]:
    """The loss of each step; after a resume the last line of a step counts."""
    return {event["step"]: event["loss"] for event in events("train", folder)}


def read_trace(folder: str = "run") -> dict[int, list[int]]:
    lines = map(json.loads, Path(folder, "samples.jsonl").read_text().splitlines())
    return {line["step"]: line["samples"] for line in lines}


class Whole(NamedTuple):
    """An undisturbed run's folder and summary."""

    folder: str
    summary: dict[str, Any]


def train_whole(factory: pytest.TempPathFactory, **flags: Any) -> Whole:
    folder = str(factory.mktemp("whole") / "run")
    return Whole(folder, run_training(**RUN | {"save_dir": folder} | flags).summary)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return train_whole(tmp_path_factory, trace_samples=True)


@pytest.fixture(scope="module")
def exact_whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return train_whole(tmp_path_factory, exact=True)


def test_a_run_leaves_what_the_contract_says() -> None:
    ended = run_training(**RUN)
    summary = json.loads(Path("run/summary.json").read_text())
    assert ended.summary == summary
    assert {path.name for path in Path("run").iterdir() if not path.name.startswith(".")} >= {
        "config.yaml", "journal.jsonl", "summary.json", "tensorboard", "best.pt", "last.pt", "checkpoints",
    }  # fmt: skip
    assert (summary["status"], summary["steps"], summary["epochs"], summary["samples"]) == ("completed", 12, 4, 240)
    assert [event["step"] for event in events("train")] == list(range(1, 13))
    assert [(event["epoch"], event["split"], event["samples"]) for event in events("eval")] == [
        *((epoch, "val", 21) for epoch in range(1, 5)),
        (4, "test", 22),
    ]
    assert [event["step"] for event in events("checkpoint")] == [3, 6, 9, 12]
    assert all(0 < event["seconds"] < 60 and 0 <= event["stall_seconds"] < 60 for event in events("checkpoint"))
    last = Path("run/checkpoints/step_00000012")
    assert events("checkpoint")[-1]["bytes"] == (last / "state.pt").stat().st_size
    assert len(events("start")) == len(events("end")) == 1
    assert summary["startup_seconds"] > 0


def test_the_best_weights_are_those_of_the_best_evaluation_and_tested_once() -> None:
    summary = run_training(**RUN | {"epochs": 6, "lr": 0.3}).summary
    accuracies = [(event["accuracy"], -event["loss"]) for event in events("eval") if event["split"] == "val"]
    best = max(range(6), key=accuracies.__getitem__)
    assert summary["best"]["epoch"] == best + 1
    assert summary["best"]["accuracy"] == accuracies[best][0]
    assert [event["split"] for event in events("eval")].count("test") == 1
    last = torch.load("run/last.pt", weights_only=True)
    assert fingerprint(last["model"]) == summary["fingerprint"]
    assert torch.load("run/best.pt", weights_only=True)["metrics"] == summary["best"]


def test_the_state_is_that_of_the_last_step() -> None:
    summary = run_training(**RUN).summary
    newest, _ = Store(Path("run/checkpoints"), 3).find_newest()
    assert newest is not None
    assert fingerprint(newest.state()["model"]) == summary["fingerprint"]


def test_without_a_validation_split_the_last_weights_are_the_best() -> None:
    summary = run_training(**RUN | {"data": "tests.support.user_code:no_validation"}).summary
    assert summary["status"] == "completed"
    assert summary["best"] == {}
    assert summary["final"]["test_accuracy"] is not None
    states = [torch.load(f"run/{name}.pt", weights_only=True)["model"] for name in ("best", "last")]
    assert fingerprint(states[0]) == fingerprint(states[1])


# -- the number of workers is a speed knob


@pytest.mark.parametrize("workers", [*(pytest.param(few, marks=pytest.mark.slow) for few in (2, 3)), 5])
def test_the_samples_of_each_step_do_not_depend_on_the_workers(workers: int) -> None:
    run_training(**SHORT, trace_samples=True)
    run_training(workers, **SHORT | {"save_dir": "other"}, trace_samples=True)
    assert read_trace("other") == read_trace()
    assert len(read_trace()) == 6
    for epoch in range(2):
        seen = [sample for step in range(3 * epoch + 1, 3 * epoch + 4) for sample in read_trace()[step]]
        assert sorted(seen) == list(range(60))


@pytest.mark.parametrize("data", ["tests.support.user_code:tensors", "tests.support.user_code:Items"])
def test_the_curve_does_not_depend_on_the_workers(data: str) -> None:
    doubled = {"data": data, "model": "tests.support.user_code:Double", "sets": ["model.args.network=own"], "epochs": 2}
    one = run_training(**RUN | doubled)
    many = run_training(3, **RUN | doubled | {"save_dir": "other"})
    assert curve("other") == pytest.approx(curve(), rel=1e-9)
    assert many.summary["final"] == pytest.approx(one.summary["final"], rel=1e-9)
    assert (one.summary["world_size"], many.summary["world_size"]) == (1, 3)


def test_exact_gives_the_same_bits_on_any_number_of_workers() -> None:
    marks = {
        run_training(workers, **SHORT | {"save_dir": f"run{workers}"}, exact=True).summary["fingerprint"]
        for workers in (1, 2, 3)
    }
    assert len(marks) == 1
    assert curve("run1") == curve("run2") == curve("run3")


# -- interrupted and resumed


def test_a_stopped_run_goes_on_where_it_was(whole: Whole) -> None:
    undisturbed = whole.summary
    stopped = run_training(**RUN, environ={"OWN_DEED": "0:19:SIGTERM"}, trace_samples=True).summary
    assert (stopped["status"], stopped["steps"]) == ("stopped", 5)
    assert json.loads(Path("run/summary.json").read_text())["status"] == "stopped"
    resumed = run_training(**RUN, trace_samples=True).summary
    assert resumed["status"] == "completed"
    assert resumed["fingerprint"] == undisturbed["fingerprint"]
    assert resumed["final"] == undisturbed["final"]
    assert resumed["best"] == undisturbed["best"]
    assert curve() == curve(whole.folder)
    assert read_trace() == read_trace(whole.folder)
    assert events("resume") == [events("resume")[0] | {"step": 5, "from_world_size": 1, "world_size": 1}]
    assert (resumed["samples"], resumed["steps"]) == (240, 12)
    assert resumed["resumed_from"] == "run/checkpoints/step_00000005"
    assert resumed["train_seconds"] > stopped["train_seconds"]
    assert resumed["startup_seconds"] > stopped["startup_seconds"]


@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 1, marks=pytest.mark.slow), (1, 3), (3, 2)])
def test_a_killed_run_goes_on_with_the_same_bits_on_another_number_of_workers(
    before: int, after: int, exact_whole: Whole
) -> None:
    """With --exact, bits are a fair question."""
    when = 26 if before == 1 else 14  # in the seventh step
    killed = run_training(before, **RUN, exact=True, environ=WRITTEN | {"OWN_DEED": f"{before - 1}:{when}:SIGKILL"})
    assert before - 1 in killed.killed
    ended = run_training(after, **RUN, exact=True)
    assert ended.error == ""
    assert ended.summary["fingerprint"] == exact_whole.summary["fingerprint"]
    assert curve() == curve(exact_whole.folder)
    assert events("resume")[0]["from_world_size"] == before
    assert events("resume")[0]["world_size"] == after


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ddp_goes_on_with_the_same_bits_on_the_same_number_of_workers(workers: int) -> None:
    flags = RUN | {"epochs": 3}
    undisturbed = run_training(workers, **flags | {"save_dir": "whole"}).summary
    when = {2: 14, 3: 9}[workers]  # in the seventh or eighth step
    run_training(workers, **flags, environ=WRITTEN | {"OWN_DEED": f"0:{when}:SIGKILL"})
    resumed = run_training(workers, **flags).summary
    assert resumed["resumed_from"]
    assert resumed["fingerprint"] == undisturbed["fingerprint"]


def test_a_signal_to_one_rank_stops_all_at_the_same_step() -> None:
    long = RUN | {"epochs": 400, "log_interval": 1000, "data": "tests.support.user_code:without_evaluation"}
    ended = run_training(3, **long, environ={"OWN_DEED": "1:30:SIGTERM", "OWN_PAUSE": "0.01"})
    assert (ended.summary["status"], ended.error, ended.killed) == ("stopped", "", [])
    assert 20 <= ended.summary["steps"] < 400
    newest, _ = Store(Path("run/checkpoints"), 3).find_newest()
    assert newest is not None
    assert newest.step == ended.summary["steps"]


def test_a_resumed_run_hears_of_a_signal_soon_too() -> None:
    """Its first step has a high number, which is not the number of steps it has timed."""
    many = RUN | {
        "epochs": 500,
        "log_interval": 5000,
        "checkpoint_every": 300,
        "data": "tests.support.user_code:without_evaluation",
        "batch_size": 10,
    }
    run_training(1, **many, max_steps=300)
    ended = run_training(2, **many, max_steps=900, environ={"OWN_DEED": "0:5:SIGTERM", "OWN_PAUSE": "0.01"})
    assert ended.summary["status"] == "stopped"
    assert 300 < ended.summary["steps"] < 400


def test_a_damaged_checkpoint_is_passed_over_and_told(whole: Whole) -> None:
    run_training(**RUN, environ={"OWN_AFTER": "run/checkpoints/step_00000009", "OWN_DEED": "0:41:SIGKILL"})
    # not step_00000009_earlier, which the kill may have left half removed
    *_, older, newest = sorted(Path("run/checkpoints").glob("step_" + "[0-9]" * 8))
    (newest / "state.pt").write_bytes((newest / "state.pt").read_bytes()[:-7])
    resumed = run_training(**RUN).summary
    assert resumed["resumed_from"] == str(older)
    assert resumed["fingerprint"] == whole.summary["fingerprint"]
    [fault] = events("fault")
    assert f"{newest}: state.pt has" in fault["action"]
    assert str(newest) in json.dumps(resumed["faults"]), "and in the summary"


def test_early_stopping_is_remembered_over_a_resume() -> None:
    flags = RUN | {"epochs": 50, "lr": 1e-9, "early_stopping_patience": 3}
    undisturbed = run_training(**flags | {"save_dir": "whole"}).summary
    assert undisturbed["status"] == "completed"
    assert undisturbed["epochs"] < 50
    run_training(**flags, environ={"OWN_DEED": "0:30:SIGTERM"})
    resumed = run_training(**flags).summary
    assert (resumed["epochs"], resumed["fingerprint"]) == (undisturbed["epochs"], undisturbed["fingerprint"])


def test_loader_processes_of_a_killed_run_do_not_keep_its_folder_locked() -> None:
    """A restart comes soon; loaders that nobody ended would hold the lock that they inherited for five seconds."""
    flags = RUN | {"data": "tests.support.user_code:Items", "num_workers": 2}
    run_training(**flags, environ=WRITTEN | {"OWN_DEED": "0:29:SIGKILL"})
    time.sleep(1)
    ended = run_training(**flags)
    assert ended.error == ""
    assert ended.summary["resumed_from"]


# -- finished and longer runs


def contents(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_finished_run_is_left_as_it_is(workers: int) -> None:
    first = run_training(**RUN)
    before = contents("run")
    assert run_training(workers, **RUN).summary == first.summary
    assert contents("run") == before


def test_a_finished_run_goes_on_when_it_gets_longer(whole: Whole) -> None:
    shutil.copytree(whole.folder, "run")
    longer = run_training(**RUN | {"epochs": 6}).summary
    assert (longer["steps"], longer["status"]) == (18, "completed")
    assert events("resume")[0]["step"] == 12


def test_a_longer_run_that_was_killed_is_not_taken_for_complete(whole: Whole) -> None:
    shutil.copytree(whole.folder, "run")
    run_training(**RUN | {"epochs": 8}, environ=WRITTEN | {"OWN_DEED": "0:33:SIGKILL"})
    ended = run_training(**RUN | {"epochs": 8}).summary
    assert (ended["steps"], ended["status"]) == (24, "completed")


def test_a_finished_run_can_go_on_in_another_folder() -> None:
    """Nothing gets better there, so its best weights are still those of the first folder."""
    first = run_training(**RUN).summary
    again = run_training(**RUN | {"save_dir": "copy"}, resume="run")
    assert again.error == ""
    assert again.summary["final"] == first["final"]
    assert Path("copy/best.pt").read_bytes() == Path("run/best.pt").read_bytes()


@pytest.mark.parametrize("epochs", [4, 5])
def test_without_best_weights_a_run_can_still_end(epochs: int, whole: Whole) -> None:
    shutil.copytree(whole.folder, "run")
    Path("run/best.pt").unlink()
    Path("run/summary.json").unlink()
    ended = run_training(**RUN | {"epochs": epochs})
    assert ended.error == ""
    assert ended.summary["final"]["test_accuracy"] is not None
    assert Path("run/best.pt").exists()


def test_config_yaml_repeats_the_run() -> None:
    first = run_training(**RUN, sets=["model.args.dropout=0.4"]).summary
    again = run_training(recipe="run/config.yaml", save_dir="again").summary
    assert again["fingerprint"] == first["fingerprint"]
    assert Path("again/config.yaml").read_text() == Path("run/config.yaml").read_text()


def test_without_a_save_dir_the_same_command_goes_on_and_a_finished_one_starts_afresh() -> None:
    flags: dict[str, Any] = {name: value for name, value in RUN.items() if name != "save_dir"}
    stopped = run_training(**flags, environ={"OWN_DEED": "0:19:SIGTERM"}).summary
    resumed = run_training(**flags).summary
    assert resumed["save_dir"] == stopped["save_dir"]
    assert run_training(**flags).summary["save_dir"] != stopped["save_dir"]


# -- wrong and failing requests


def test_an_explicit_difference_is_refused_and_nothing_is_touched() -> None:
    run_training(**RUN, environ={"OWN_DEED": "0:19:SIGTERM"})
    before = contents("run")
    ended = run_training(2, **RUN | {"lr": 0.5})
    assert ended.kind == "RequestError"
    assert "--lr 0.5 differs from 0.05" in ended.error
    assert contents("run") == before


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"model": "convnet"}, "--model convnet needs images"),
        ({"init_from": "nowhere.pt"}, "nowhere.pt"),
        ({"data": "har"}, "har"),
        ({"warmup_epochs": 9.0}, "warmup"),
        ({"sync_bn": True}, "--sync-bn"),
        ({"freeze": ["nothing"]}, "--freeze"),
    ],
)
def test_a_wrong_request_leaves_no_folder(workers: int, flags: dict[str, Any], named: str) -> None:
    ended = run_training(workers, **RUN | flags)
    assert ended.kind == "RequestError", ended.error
    assert named in ended.error
    assert not Path("run").exists()


def test_a_gradient_that_stays_infinite_ends_the_run_with_a_summary() -> None:
    ended = run_training(2, **RUN | {"model": "tests.support.user_code:explosive", "epochs": 9})
    assert ended.kind == "TrainingError"
    assert "NaN or infinite" in ended.error
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "failed"
    assert "NaN or infinite" in summary["error"]
    assert summary["fingerprint"] is None


def test_a_few_skipped_steps_are_told() -> None:
    sets = ["model.args.at=33"]  # the passes of the last steps
    summary = run_training(**RUN | {"model": "tests.support.user_code:explosive"}, sets=sets).summary
    assert summary["status"] == "completed"
    assert {fault["kind"] for fault in summary["faults"]} == {"nonfinite"}
    assert all(torch.isfinite(value).all() for value in torch.load("run/last.pt", weights_only=True)["model"].values())


def test_a_dry_run_writes_nothing() -> None:
    plan = run_training(**RUN, dry_run=True).summary
    assert (plan["steps_per_epoch"], plan["total_steps"], plan["save_dir"]) == (3, 12, "run")
    assert not Path("run").exists()


# -- settings that change the weights as they say


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The fingerprint without any of them, by global batch."""
    folder = str(tmp_path_factory.mktemp("plain"))
    sizes = {size: SHORT | {"global_batch_size": size, "save_dir": f"{folder}/{size}"} for size in (20, 25)}
    return {size: run_training(**flags).summary["fingerprint"] for size, flags in sizes.items()}


@pytest.mark.parametrize(
    "flags",
    [
        {"ema": 0.9},
        {"max_grad_norm": 0.05},
        {"optimizer": "sgd"},
        {"label_smoothing": 0.2},
        {"amp": "bf16"},
        {"freeze": ["2.*"]},
        {"seed": 7},
        {"schedule": "linear"},
        {"weight_decay": 0.5},
        {"drop_last": True, "global_batch_size": 25},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_it_takes_effect_alike_on_two_workers(flags: dict[str, Any], plain: dict[int, str]) -> None:
    one = run_training(**SHORT | flags | {"save_dir": "one"}).summary
    two = run_training(2, **SHORT | flags | {"save_dir": "two"}).summary
    assert one["fingerprint"] != plain[20 + 5 * ("drop_last" in flags)]
    assert curve("two") == pytest.approx(curve("one"), rel=2e-2 if "amp" in flags else 1e-4)
    assert two["final"]["val_loss"] == pytest.approx(one["final"]["val_loss"], rel=2e-2 if "amp" in flags else 1e-4)


def test_an_average_that_forgets_at_once_is_the_weights_themselves(whole: Whole) -> None:
    plain = whole.summary["final"]["val_loss"]
    assert run_training(**RUN | {"ema": 1e-6, "save_dir": "one"}).summary["final"]["val_loss"] == pytest.approx(
        plain, rel=1e-3
    )
    assert run_training(**RUN | {"ema": 0.9, "save_dir": "two"}).summary["final"]["val_loss"] != pytest.approx(
        plain, rel=1e-3
    )


def test_grad_checkpointing_changes_nothing_but_memory(whole: Whole) -> None:
    thrifty = run_training(**RUN, grad_checkpointing=True).summary
    assert thrifty["fingerprint"] == whole.summary["fingerprint"]


def test_a_warm_start_begins_with_those_weights(whole: Whole) -> None:
    shutil.copy(f"{whole.folder}/last.pt", "weights.pt")
    run_training(**RUN | {"save_dir": "warm", "init_from": "weights.pt", "lr": 1e-12, "epochs": 1})
    before, after = (torch.load(path, weights_only=True)["model"] for path in ("weights.pt", "warm/last.pt"))
    for name, value in before.items():
        if "running" not in name and "num_batches" not in name:
            assert torch.allclose(after[name], value, atol=1e-6), name


def count_frozen_anew() -> None:
    gc.get_freeze_count = getattr(gc.get_freeze_count, "__wrapped__", gc.get_freeze_count)  # see conftest.py


def test_garbage_is_collected_in_the_loop_but_not_among_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = engine.fit

    def watched(run: Run) -> str:
        Path("seen.json").write_text(json.dumps([gc.isenabled(), gc.get_freeze_count() > 10_000]))
        return fit(run)

    def ended(run: Run, status: str) -> dict[str, Any]:
        Path("left").write_text(str(gc.get_freeze_count()))
        return finish_run(run, status)

    monkeypatch.setattr(engine, "fit", watched)
    monkeypatch.setattr(engine, "finish_run", ended)

    def begin() -> None:
        count_frozen_anew()
        gc.unfreeze()  # as in a process that is not forked
        gc.disable()  # as the front door does

    assert run_training(**RUN | {"epochs": 1}, prepare=begin).summary["status"] == "completed"
    assert json.loads(Path("seen.json").read_text()) == [True, True]
    assert Path("left").read_text() == "0"


def test_what_a_caller_froze_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(run: Run, status: str) -> dict[str, Any]:
        Path("left").write_text(str(gc.get_freeze_count() > 10_000))
        return finish_run(run, status)

    monkeypatch.setattr(engine, "finish_run", watched)
    ended = run_training(**RUN | {"epochs": 1}, prepare=count_frozen_anew)
    assert ended.summary["status"] == "completed", "in a fork, which freezes what it has"
    assert Path("left").read_text() == "True"


def test_a_step_always_says_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a hang is told of a wrong place."""

    def at(_: Watchdog, steps: int, phase: str, *samples: object) -> None:
        with open("seen.txt", "a") as file:
            file.write(f"{steps} {phase}\n")

    monkeypatch.setattr(Watchdog, "set_position", at)
    assert run_training(**RUN | {"max_steps": 2, "batch_size": 10, "log_interval": 2}).summary["status"] == "completed"
    pass_ = ["fetching data", "forward", "backward"]
    told = [*pass_, *pass_[:2], "last backward", "reduction", "optimizer"]
    seen = Path("seen.txt").read_text().splitlines()
    first = seen.index("0 forward") - 1
    second = seen.index("1 fetching data")
    assert seen[first - 1] == "0 fetching data", "also while the loader begins its epoch"
    assert seen[first : first + len(told)] == [f"0 {phase}" for phase in told]
    assert "1 agreeing" in seen[first + len(told) : second]
    assert seen[second : second + len(told)] == [f"1 {phase}" for phase in told]
    after = [line for line in dict.fromkeys(seen) if line.startswith("2 ")]
    assert after == ["2 agreeing", "2 logging", "2 saving", "2 evaluating"]


def test_a_complete_run_gives_its_summary_and_its_weights() -> None:
    request = Mock(spec_set=["spec", "console", "world"])
    request.spec.is_complete, request.spec.resume_point = True, Mock(summary={"steps": 12}, folder="run")
    assert engine.run(request) == {"steps": 12}
    request.console.report.assert_called_once_with({"steps": 12})
    request.spec.factories.adopt_weights.assert_called_once_with("run", request.world)


def test_an_epoch_goes_on_after_memory_ran_out_and_ends_at_any_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run, errors = (
        Mock(progress=Mock(evaluation_pending=False)),
        [torch.OutOfMemoryError("CUDA out of memory"), "outcome", RuntimeError("mine")],
    )
    run.plan.batches.steps_per_epoch, run.progress.step, run.moments.epoch_begin = 3, 4, [run.begin]
    run.loaders.train.epoch.side_effect = lambda *_: iter([("layout", "work")])
    type(run).finished = PropertyMock(side_effect=[False, False, True, False])
    for name in ("train_step", "finish_step", "recover_from_out_of_memory"):
        monkeypatch.setattr(engine, name, getattr(run, name))
    run.train_step.side_effect, run.finish_step.return_value = errors, ""
    assert engine.fit(run) == "completed"
    layout = (run.plan.batches, 1, 1, run.world.rank, run.strategy.replicas_per_process)
    begin = [
        call.begin(run),
        call.observer.watchdog.set_position(4, "fetching data"),
        call.loaders.train.epoch(*layout),
    ]
    step = [*begin, call.train_step(run, "layout", "work")]
    ends = call.recover_from_out_of_memory(run, errors[0]), call.finish_step(run, "outcome")
    assert run.mock_calls == [call.observer.timer.start(), *step, ends[0], *step, ends[1]]
    with pytest.raises(RuntimeError, match="mine"):
        engine.fit(run)


def record_finish(monkeypatch: pytest.MonkeyPatch, *what: str) -> tuple[str, list[str]]:
    """Finish a step of a mock run to which these things happen; return the verdict, and the calls in their order."""
    told: list[str] = []
    run = Mock(finished="finished" in what)
    run.progress = Mock(step=7, evaluation_pending=False, stopped_early=False)
    run.checkpointer.saved_step = 0

    def plan_evaluation(_: Run) -> None:
        run.progress.evaluation_pending = "unevaluated" not in what

    def evaluate_epoch(_: Run) -> bool:
        told.append("evaluate_epoch")
        run.progress.evaluation_pending = "left" in what
        if "early" in what:
            run.finished = run.progress.stopped_early = True
        return "left" not in what

    def save_checkpoint(_: Run) -> None:
        told.append("save_checkpoint")
        run.checkpointer.saved_step = 7

    for name in ("log_recovery", "log_step", "add_requested_part"):
        monkeypatch.setattr(engine, name, lambda *_, name=name: told.append(name))
    for function in (plan_evaluation, evaluate_epoch, save_checkpoint):
        monkeypatch.setattr(engine, function.__name__, function)
    run.complete_step.return_value = Mock(
        savable="unsavable" not in what, at_log_interval="logged" in what, at_epoch_end="epoch" in what
    )
    asked = ("stopping", "pausing", "overdue", "asked")
    run.agree_on_requests.return_value = tuple(name in what for name in asked)
    run.checkpointer.schedule.update_due.return_value = "due" in what
    run.log.console.note = told.append
    run.control.stop.signal = "SIGTERM"
    verdict = engine.finish_step(run, Mock())
    assert told.pop(0) == "log_recovery"
    return verdict, told


def test_step_end_does_what_is_due_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = partial(record_finish, monkeypatch)
    log, save, evaluate, said = "log_step", "save_checkpoint", "evaluate_epoch", "stopped by SIGTERM at step 7"
    assert finish() == ("", [])
    assert finish("logged", "epoch") == ("", [log, evaluate])
    assert finish("epoch", "due") == ("", [save, evaluate]), "it may be killed in the evaluation"
    assert finish("due") == finish("overdue") == ("", [save])
    assert finish("due", "overdue", "unsavable") == ("", [])
    assert finish("asked") == ("", ["add_requested_part"])
    assert finish("stopping", "asked") == ("stopped", [log, save, said])
    assert finish("stopping", "logged") == ("stopped", [log, save, said])
    assert finish("stopping", "epoch", "finished") == ("stopped", [log, save, said]), "the evaluation is for the resume"
    assert finish("stopping", "epoch", "finished", "unevaluated") == ("finished", [log, save, evaluate])
    assert finish("pausing", "epoch") == ("stopped", [log, save, evaluate, said])
    assert finish("epoch", "left") == ("stopped", [evaluate, save, said])
    assert finish("epoch", "due", "left", "asked") == ("stopped", [save, evaluate, said])
    assert finish("epoch", "early", "asked") == ("finished", [evaluate, log])
    assert finish("finished", "epoch", "asked") == ("finished", [log, save, evaluate])


@pytest.mark.parametrize(("exact", "hooked"), [(False, False), (True, False), (False, True)])
def test_a_step_asks_for_all_its_parts_in_order(exact: bool, hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, layout, batch = Mock(optimizer_draws=exact), StepLayout(7, 4, 2, []), Mock(micro_batch_index=1)
    run.config.reproducibility, run.config.optimizer.max_grad_norm = Mock(seed=3, exact=exact), "off" if exact else 1
    run.spec.placement.devices, run.observer.fetch.return_value = ["cpu"], [(batch, True)]
    run.moments = SimpleNamespace(after_backward=[run.look] if hooked else [], step_end=[run.end])
    run.after_step, run.task.global_loss = run.after if hooked else None, None
    run.loss_normalizer.count_units.return_value = 0.5
    run.state.precision.clip_and_step.return_value = "norm", "skipped"
    for name in ("forward_backward", "multiply_gradients", "seed_micro_batch", "seed_optimizer_step"):
        monkeypatch.setattr(engine, name, getattr(run, name))
    outcome = engine.train_step(run, layout, iter(()))
    parameters = run.strategy.local_parameters
    divisor, multiplied = run.loss_normalizer.divisor.return_value, exact or hooked
    clip = None if exact else 1.0, run.strategy.total_norm, None if multiplied else 0.5
    assert [each for each in run.mock_calls if each[0] not in ("loss_normalizer.divisor", "observer.fetch")] == [
        call.set_learning_rates(7),
        call.strategy.begin_step(2),
        *([call.after.begin_step()] if hooked else []),
        call.seed_micro_batch(3, 7, 1, "cpu"),
        call.forward_backward(run, batch, divisor, last=True, observer=run.observer),
        call.strategy.after_backward(1),
        call.task.units(batch),
        call.observer.phase("reduction"),
        call.strategy.reduce_gradients(idle=False),
        call.loss_normalizer.count_units([run.task.units.return_value], 4),
        *([call.multiply_gradients(parameters, 0.5)] if multiplied else []),
        call.checkpointer.writer.wait_for_staging(),
        *([call.look(run, 7)] if hooked else []),
        call.observer.phase("optimizer"),
        *([call.seed_optimizer_step(3, 7, "cpu")] if exact else []),
        call.state.precision.clip_and_step(run.state.optimizer, parameters, *clip),
        call.strategy.rollback_buffers("skipped"),
        *([call.after.call(8, "skipped", 3, ["cpu"])] if hooked else []),
        call.state.average.update_parameters(run.state.model, "skipped"),
        call.loss_normalizer.get_step_norm("norm"),
        call.observer.step_done(outcome, run.loss_normalizer.last),
        call.end(run, 7, outcome),
    ]
    norm, skipped = run.loss_normalizer.get_step_norm(), run.state.precision.clip_and_step.return_value[1]
    assert outcome == (2, {1: run.forward_backward.return_value}, norm, skipped)


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a GPU: reading a number, or a result whose size depends on values."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.__name__.partition(".")[0]) in self.WAITING:
            self.found.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("flags", [{}, {"max_grad_norm": "off"}, {"batch_size": "5", "global_batch_size": "20"}])
def test_no_step_waits_for_the_device(flags: dict[str, str]) -> None:
    """Its numbers are read once a log line. Steps on a CPU, told that they are on a GPU, where waiting costs."""
    words = {
        "data": "tests.support.user_code:tensors",
        "model": "tests.support.user_code:net",
        "save_dir": "run",
        "global_batch_size": "20",
    } | flags
    console = Console("quiet", io.StringIO())
    choice = Placement("single", (torch.device("cpu"),), 0, "test")
    with ExitStack() as stack:
        opening = resolve_request(resolve(words, [], None), choice, None, console, print, FromConfig())
        run = stack.enter_context(open_run(stack.enter_context(opening)))
        works = run.loaders.train.epoch(run.plan.batches, 0, 0, 0, 1)
        engine.train_step(run, *next(works))
        run.state.precision.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
        with Waits() as waits:
            engine.train_step(run, *next(works))
            assert waits.found == []
            float(run.strategy.local_parameters[0].detach().sum())
            assert waits.found == ["_local_scalar_dense"], "it can see"
        run.state.precision.device = torch.device("cpu")
