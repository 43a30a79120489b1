"""When hooks are called, on which ranks, with what; and what happens if one fails, is slow, or changes something."""

import json
from concurrent.futures import wait
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch

from multigpu_cli.checkpoint.snapshot import Writer
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.config.code_names import parse_hook
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.hooks import hooks as user_hooks
from multigpu_cli.hooks.hooks import Hook, UserHooks, copy_state, load_hook
from multigpu_cli.monitor.history import load_history
from multigpu_cli.monitor.journal import read_events
from multigpu_cli.run.request import prepare
from tests.run.test_spec import spec
from tests.support.run_training import Ended, run_training
from tests.support.world import ALONE

HOOKS = """
import json, os, time
import torch

class Notes:
    ranks = "all"
    def __init__(self):
        self.count = 0
    def note(self, name, numbers, **more):
        fields = ("step", "epoch", "loss", "grad_norm", "split", "status", "error", "samples", "learning_rate")
        fields += ("skipped", "loss_scale", "total_steps", "world_size")
        told = {field: getattr(numbers, field) for field in fields} | more
        told["checkpoint"] = os.path.basename(numbers.checkpoint)
        told["metrics"] = sorted(numbers.metrics)
        with open(f"notes-{numbers.rank}.jsonl", "a") as file:
            file.write(json.dumps([name, told]) + "\\n")
    def start(self, numbers): self.note("start", numbers, count=self.count)
    def after_backward(self, numbers, tensors):
        self.count += 1
        norm = torch.stack([each.square().sum() for each in tensors.values()]).sum().sqrt()
        self.note("after_backward", numbers, names=list(tensors), norm=float(norm))
    def step_end(self, numbers, tensors): self.note("step_end", numbers, names=list(tensors))
    def evaluated(self, numbers): self.note("evaluated", numbers)
    def epoch_end(self, numbers): self.note("epoch_end", numbers)
    def saved(self, numbers):
        assert os.path.exists(numbers.checkpoint + "/manifest.json")
        self.note("saved", numbers)
    def end(self, numbers): self.note("end", numbers)
    def failed(self, numbers): self.note("failed", numbers)
    def state_dict(self): return {"count": self.count, "tensor": torch.tensor([self.count])}
    def load_state_dict(self, state):
        assert int(state["tensor"]) == state["count"]
        self.count = state["count"]

class OnOne:
    ranks = (1,)
    every = 2
    def __init__(self): self.steps = []
    def step_end(self, numbers, tensors):
        assert numbers.rank == 1
        self.steps.append(numbers.step)
    def saved(self, numbers): pass
    def end(self, numbers):
        with open("on-one.json", "w") as file:
            json.dump(self.steps, file)
    def state_dict(self): return {"steps": self.steps}
    def load_state_dict(self, state): self.steps = state["steps"]

class Greedy:
    def __init__(self, how): self.how = how
    def after_backward(self, numbers, tensors):
        if self.how == "gradient":
            tensors["2.weight"].clamp_(-1, 1)
        if self.how == "no_grad":
            torch.set_grad_enabled(False)
        if self.how == "frozen":
            numbers.loss = 3.0
        if self.how == "raises":
            raise KeyError("nothing there")
        if self.how == "exits":
            raise SystemExit(0)
    def step_end(self, numbers, tensors):
        if self.how == "weight":
            tensors["2.weight"][0, 0] = 1.0
        if self.how == "hidden":
            tensors["2.weight"].data[0, 0] = 1.0
    def end(self, numbers): pass
    def failed(self, numbers):
        raise ValueError("cannot even fail")
    def state_dict(self): return {"x": object()} if self.how == "state" else {}
    def load_state_dict(self, state): pass

class Slow:
    budget_ms, every = 5, 3
    def after_backward(self, numbers, tensors): self._note(numbers)
    def step_end(self, numbers, tensors):
        time.sleep(0.02)
        self._note(numbers)
    def start(self, numbers): pass
    def _note(self, numbers):
        with open("slow.txt", "a") as file:
            file.write(f"{numbers.step} ")
"""
RUN: dict[str, Any] = {"epochs": 2, "batch_size": 10, "global_batch_size": 20, "save_dir": "run"}
STEPS, NAMES = 3, ["2.weight", "3.weight", "3.bias", "6.weight", "6.bias"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_hooks.py").write_text(HOOKS)


def notes(rank: int = 0) -> list[Any]:
    return [json.loads(line) for line in Path(f"notes-{rank}.jsonl").read_text().splitlines()]


def greedy(how: str, **more: Any) -> Ended:
    return run_training(**RUN | more, hook=["own_hooks:Greedy"], sets=[f"hook.args.Greedy={{how: {how}}}"])


def test_each_method_has_its_moment_on_each_rank() -> None:
    hooks = [f"own_hooks:{name}" for name in ("Notes", "OnOne", "Greedy")]
    ended = run_training(2, **RUN, hook=hooks, log_interval=1, keep=9, sets=["hook.args.Greedy={how: not}"])
    assert ended.error == ""
    found = notes()
    steps = ["after_backward", "step_end"]
    order = [name for name, _ in found if name != "saved"]
    epoch = [*steps * STEPS, "evaluated", "epoch_end"]
    assert order == ["start", *epoch, *epoch, "evaluated", "end"]
    assert [told["checkpoint"] for name, told in found if name == "saved"] == ["step_00000003", "step_00000006"]
    by_name: dict[str, list[Any]] = {}
    for name, told in found:
        by_name.setdefault(name, []).append(told)
    journal = load_history(Path("run"))
    for told in by_name["step_end"]:
        line = journal.train[told["step"]]
        assert (told["loss"], told["grad_norm"]) == (line["loss"], line["grad_norm"])
        assert (told["epoch"], told["samples"], told["learning_rate"]) == (line["epoch"], line["samples"], line["lr"])
        assert told["names"] == NAMES
    norms = [told["norm"] for told in by_name["after_backward"]]
    assert norms == pytest.approx([told["grad_norm"] for told in by_name["step_end"]])
    assert [told["split"] for told in by_name["evaluated"]] == ["val", "val", "test"]
    assert by_name["evaluated"][2]["metrics"] == ["test_accuracy", "test_loss"]
    assert by_name["end"][0]["status"] == "completed"
    other = notes(1)
    assert [told["checkpoint"] for name, told in other if name == "saved"] == ["step_00000003", "step_00000006"]
    assert [each for each in other if each[0] != "saved"] == [each for each in found if each[0] != "saved"]
    assert json.loads(Path("on-one.json").read_text()) == [2, 4, 6]
    plan = journal.plan["hooks"]
    every = ", ".join(["start", *steps, "evaluated", "epoch_end", "saved", "end", "failed"])
    assert plan[0] == f"own_hooks:Notes, on all ranks: {every}"
    usual = {"skipped": False, "loss_scale": 1.0, "total_steps": 2 * STEPS, "world_size": 2}
    assert all(usual.items() <= told.items() for _, told in found)
    assert plan[1] == "own_hooks:OnOne, on rank 1: step_end, saved, end; each 2 steps"
    assert run_training(**RUN | {"epochs": 3}, hook=["own_hooks:OnOne"]).error == ""
    [told] = load_history(Path("run")).plan["hooks"]
    assert told == "own_hooks:OnOne, on rank 1, which is not there: step_end, saved, end; each 2 steps"


def test_a_checkpoint_that_was_not_written_is_not_said_to_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, save = Writer.submit, Store.save

    def submit_and_wait(self: Writer, *job: Any) -> None:
        submit(self, *job)
        wait(self._jobs)  # so that the next log line finds it done

    def save_but_not_the_second(self: Store, step: int, *state: Any) -> int:
        if step == 4:
            raise OSError(ENOSPC, "No space left on device")
        return save(self, step, *state)

    monkeypatch.setattr(Writer, "submit", submit_and_wait)
    monkeypatch.setattr(Store, "save", save_but_not_the_second)
    flags = RUN | {"log_interval": 1, "checkpoint_every": 2, "keep": 9}
    assert run_training(2, **flags, hook=["own_hooks:Notes"]).error == ""
    for rank in range(2):
        told = [told["checkpoint"] for name, told in notes(rank) if name == "saved"]
        assert told == ["step_00000002", "step_00000006"]
    lines = [event["event"] for event in read_events("run/journal.jsonl")]
    names = [name for name, _ in notes()]
    late = "with the next train line, not the next checkpoint"
    assert names.index("saved") < names.index("evaluated"), late
    assert lines.index("fault") < lines.index("eval", lines.index("eval") + 1), late


def test_state_goes_on_with_another_number_of_workers_and_hooks_may_change() -> None:
    flags = RUN | {"hook": ["own_hooks:Notes", "own_hooks:OnOne"], "max_steps": 3}
    assert run_training(2, **flags).error == ""
    hooks = ["own_hooks:OnOne", "again=own_hooks:Slow", "own_hooks:Notes", "new=own_hooks:OnOne"]
    assert run_training(**RUN | {"epochs": 3, "hook": hooks}).error == "", "one worker, on which OnOne has no place"
    starts = [told["count"] for name, told in notes() if name == "start"]
    assert starts == [0, 3]
    state = torch.load("run/checkpoints/step_00000009/state.pt", weights_only=True)
    assert list(state["hooks"]) == ["OnOne", "Notes"]
    assert state["hooks"]["OnOne"] == {"steps": [2]}, "for the workers that the run may have next"
    assert run_training(2, **RUN | {"epochs": 4}, hook=["own_hooks:Notes"]).error == ""
    assert [told["count"] for name, told in notes(1) if name == "start"] == [0, 9], "of the lowest rank"
    state = torch.load("run/checkpoints/step_00000012/state.pt", weights_only=True)
    assert list(state["hooks"]) == ["Notes"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("gradient", "Greedy: after_backward changed the gradient of 2.weight at step 1"),
        ("weight", "Greedy: step_end changed the weight of 2.weight at step 1"),
        ("raises", "Greedy: after_backward raised KeyError in own_hooks.py:"),
        ("exits", "Greedy: after_backward raised SystemExit in own_hooks.py:"),
        ("frozen", "Greedy: after_backward raised FrozenInstanceError"),
        ("state", "state_dict returned a builtins.object, which a checkpoint can't hold"),
    ],
)
def test_what_a_hook_must_not_do_ends_the_run_by_name(how: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    ended = greedy(how)
    assert "warning: --hook own_hooks:Greedy: failed raised ValueError in own_hooks.py:" in "".join(capfd.readouterr())
    assert ended.kind == "TrainingError"
    assert f"--hook own_hooks:{words}" in ended.error or words in ended.error
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "failed"
    assert words in summary["error"], "its own method failed raised as well, and hides nothing"


def test_a_change_that_torch_does_not_count_is_found_when_replicas_are_compared() -> None:
    flags = RUN | {"hook": ["own_hooks:Greedy"], "sets": ["hook.args.Greedy={how: hidden}"]}
    ended = run_training(2, **flags)
    assert "the replicas differ at step 3: rank" in ended.error
    assert "2.weight" in ended.error
    assert "hook" in ended.error


def test_one_that_turns_gradients_off_does_so_for_itself_alone() -> None:
    assert greedy("no_grad").error == ""


def test_a_slow_one_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_training(**RUN, hook=["own_hooks:Slow"]).error == ""
    said = "".join(capfd.readouterr())
    assert said.count("warning: --hook own_hooks:Slow: ") == 1
    assert "of a budget of 5 ms" in said
    assert Path("slow.txt").read_text() == "3 3 6 6 ", "each third step, also where no other hook asks for more"


def test_a_call_takes_the_time_of_its_own_and_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    times = iter([5.0, 5.25, 6.0, 6.05])
    monkeypatch.setattr(user_hooks, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    watchdog = SimpleNamespace(mark_progress=lambda: seen.append("progress"))
    log = SimpleNamespace(console=SimpleNamespace(warn=seen.append))
    run: Any = SimpleNamespace(observer=SimpleNamespace(watchdog=watchdog), log=log, world=ALONE)
    hook = replace(load_timed(), object=SimpleNamespace(start=lambda numbers: seen.append("called")))
    for _ in range(2):
        user_hooks._call_one(run, hook, "start", cast(Any, SimpleNamespace(step=3)), (), {})
    warning = (
        f"--hook {__name__}:Timed: start took 250.0 ms at step 3, of a budget of 100 ms (its budget_ms): "
        "training waits for it. This is said once."
    )
    assert seen == ["progress", "called", "progress", warning, "progress", "called", "progress"]


class Timed:
    def start(self, numbers: Any) -> None:
        """Never called."""


class Misspelt(Timed):
    def on_step_end(self, numbers: Any, tensors: Any) -> None:
        """Nor is it."""


class Empty:
    def run(self) -> None:
        """Nor is it."""


class Nothing:
    pass


class Short:
    def step_end(self, numbers: Any) -> None:
        """It takes no tensors."""


class Half(Timed):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Later:
    async def start(self, numbers: Any) -> None:
        """Would be a coroutine."""


class Yielding:
    def start(self, numbers: Any) -> Any:
        yield numbers


METHODS = "start, after_backward, step_end, evaluated, epoch_end, saved, end, failed"


@pytest.mark.parametrize(
    ("found", "problem", "remedy"),
    [
        (load_hook, "it is a function, not a class", "name a class"),
        (
            Misspelt,
            "it has a method 'on_step_end', which is never called",
            "did you mean 'step_end'? (Or _on_step_end, if it is meant.)",
        ),
        (Empty, "it has none of the methods of a hook; it has run", f"one of: {METHODS}"),
        (Nothing, "it has none of the methods of a hook", f"one of: {METHODS}"),
        (
            Short,
            "step_end does not take 2 arguments: too many positional arguments",
            "def step_end(self, numbers, tensors)",
        ),
        (Half, "it has state_dict, and no load_state_dict", "both of them, or neither"),
        *(
            (each, "calling start would not run its body", "a plain method, without async and yield")
            for each in (Later, Yielding)
        ),
    ],
)
def test_a_class_that_is_no_hook_is_refused(found: Any, problem: str, remedy: str) -> None:
    with pytest.raises(RequestError) as refused:
        load_hook(parse_hook(f"{__name__}:{found.__name__}"), {})
    assert (refused.value.problem, refused.value.remedy) == (f"--hook {__name__}:{found.__name__}: {problem}", remedy)


def load_timed(**attributes: Any) -> Hook:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in attributes.items():
            patch.setattr(Timed, name, value, raising=False)
        return load_hook(parse_hook(f"{__name__}:Timed"), {})


def test_a_rank_of_processes_that_are_to_be_launched_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timed, "ranks", (1,), raising=False)
    monkeypatch.setattr(prepare, "set_threads_per_rank", lambda *_, **__: 1)
    for workers in (1, 2):
        told = "".join(UserHooks(spec(workers, hook=[f"{__name__}:Timed"]), ALONE).plan_notes()["hooks"])
        assert ("on rank 1, which is not there: " in told) == (workers == 1), told
    with_dp = spec(2, hook=[f"{__name__}:Timed"])
    with_dp = replace(with_dp, placement=with_dp.placement._replace(strategy="dp"))
    told = "".join(UserHooks(with_dp, ALONE).plan_notes()["hooks"])
    assert "on rank 1, which is not there: " in told, "one process has all GPUs"


def test_where_and_when_it_is_called_follows_from_its_class() -> None:
    usual, twice = load_timed(), load_timed(ranks=(2, 0, 2), every=3, budget_ms=0.5)
    assert (usual.ranks, usual.every, usual.budget_ms) == ((0,), 1, 100)
    assert (twice.ranks, twice.every, twice.budget_ms) == ((0, 2), 3, 0.5)
    assert twice.describe(1).endswith(", on rank 0, 2: start"), "one of them is there, and start is called once"
    ranks = [hook.first_rank(replace(ALONE, size=3)) for hook in (twice, load_timed(ranks=(3,)))]
    assert ranks == [0, None]
    assert load_timed(_saved=print, ended=3).methods == ("start",), "neither is a method that was misspelt"
    assert (load_timed(ranks="all").ranks, load_timed(ranks=range(2)).ranks) == (None, (0, 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("ranks", ranks) for ranks in ((), (0, -1), (0, True), True, 1.5, "0")), ("every", 0), ("budget_ms", 0)],
)
def test_what_makes_no_sense_of_it_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"--hook {__name__}:Timed: its {name}"):
        load_timed(**{name: value})


def test_a_state_has_plain_values_and_tensors_of_its_own() -> None:
    class Steps(int):
        pass

    tensor = torch.ones(2)
    state = {"steps": Steps(3), "numbers": (numpy.int64(4), numpy.float32(0.5)), "on": [True, None, "x"], "t": tensor}
    found = copy_state(state, "it")
    tensor.zero_()
    assert found == {"steps": 3, "numbers": (4, 0.5), "on": [True, None, "x"], "t": found["t"]}
    assert [type(value) for value in (found["steps"], *found["numbers"])] == [int, int, float]
    assert found["t"].tolist() == [1.0, 1.0]
    for unfit in (numpy.ones(1), torch.float32):
        with pytest.raises(TrainingError, match=r"it a .*, which a checkpoint can't hold"):
            copy_state([unfit], "it")


def test_a_failed_run_is_told_to_the_hook() -> None:
    ended = run_training(**RUN, hook=["own_hooks:Notes"], model="tests.support.user_code:explosive", nonfinite="stop")
    assert ended.kind == "TrainingError"
    name, told = notes()[-1]
    assert (name, told["status"]) == ("failed", "failed")
    assert "NaN or infinite" in told["error"]
