"""A first batch that does not fit is told whole; what is built, and what a checkpoint brings, reaches its place."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.api.from_objects import FromObjects
from multigpu_cli.checkpoint.weights import describe_code, fingerprint
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.run.assembly import assemble
from multigpu_cli.run.assembly.assemble import build_components, smoke_test_batch
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig, RunSpec
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.tasks.base import Task
from multigpu_cli.tasks.supervised import Classification
from tests.support.optimizers import ScheduleFreeSGD
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE, CPU

DATA = "tests.support.user_code:tensors"
EACH = Precision("off", CPU)


def prepare(folder: Path, world: World = ALONE, factories: FromConfig | None = None, **flags: Any) -> RunSpec:
    config = resolve({"data": DATA, "model": "mlp", "save_dir": str(folder), "num_workers": "0"} | flags, (), None)
    strategy = "ddp" if world.size > 1 else "single"
    return prepare_spec(config, Placement(strategy, (CPU,), 0, "a test"), world, factories or FromConfig())


class Parts(nn.Linear):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(left)


class Broken(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        raise ValueError("not today")


MINE, BUILT = "another --model, or --task", "; --debug shows the traceback"
OUTPUTS = "a factory that has as many outputs as its num_classes says, which is 3, or another --task"
FLOATS, NUMBERS = torch.zeros(2, 6), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("model", "inputs", "targets", "said", "remedy"),
    [
        (
            nn.Linear(6, 5),
            FLOATS,
            NUMBERS,
            ["ValueError in ", "  it was called with  float32 (2, 6)", "  it returned         float32 (2, 5)"],
            OUTPUTS,
        ),
        (
            Parts(6, 5),
            (FLOATS[:1], FLOATS[:1]),
            NUMBERS[:1],
            [
                "ValueError in ",
                "  it was called with  (float32 (1, 6), float32 (1, 6))",
                "  that is             model(left, right): one argument for each part of a sample",
                "  it returned         float32 (1, 5)",
            ],
            OUTPUTS,
        ),
        (
            nn.Linear(6, 3),
            FLOATS,
            {"boxes": NUMBERS},
            ["AttributeError in ", "  it was called with  float32 (2, 6)", "  it returned         float32 (2, 3)"],
            "--task my_code:Task, a class of your own; or --task from-model, if the model returns its loss",
        ),
        (
            nn.Embedding(4, 3),
            torch.tensor([1, 9]),
            NUMBERS,
            [
                "IndexError in ",
                "  its inputs are 1 to 9, and the embedding has 4 rows",
                "  it was called with  int64 (2,)",
                "  it returned         nothing: it failed itself",
            ],
            "an embedding with a row for every number in the data, or smaller numbers",
        ),
        (
            Broken(),
            FLOATS,
            NUMBERS,
            [
                "ValueError in ",
                "  it was called with  float32 (2, 6)",
                "  it returned         nothing: it failed itself",
            ],
            "a model for these inputs",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_told_whole(
    model: nn.Module, inputs: Any, targets: Any, said: list[str], remedy: str, tmp_path: Path
) -> None:
    batch = Batch(inputs, targets, torch.arange(len(targets) if isinstance(targets, torch.Tensor) else len(NUMBERS)), 0)
    found = prepare(tmp_path)
    own = FromObjects(source=found.source, model=model)
    objects = prepare(tmp_path, factories=own)
    called = own.adapt_model(objects.config)
    for spec in (found, objects):
        task = spec.factories.build_task(spec.config, spec.source)
        with pytest.raises(RequestError) as raised:
            smoke_test_batch(spec, task, called, EACH, batch, which="last batch")
        head, error, *lines = raised.value.problem.splitlines()
        assert head == (
            f"--model mlp does not take the last batch of --data {DATA}, or --task classification not what it returns"
        )
        *rest, kind, expected = lines
        assert error.startswith(f"  {said[0]}")
        built = ["  the model was built for input_shape=(6,), num_classes=3"] if spec is found else []
        notes = [line for line in said[1:] if line.startswith("  its")]
        assert rest == [*notes, *built, *said[1 + len(notes) :]]
        assert kind.startswith("  the targets are     ")
        assert expected == f"  the task expects    {task.expected_shapes}"
        alone = "a last layer with 3 outputs, or another task" if remedy is OUTPUTS else remedy
        assert raised.value.remedy == (remedy + BUILT if spec is found else alone)


@pytest.mark.parametrize(
    ("task", "output", "wanted", "said"),
    [
        ("mine", (torch.zeros(2),), 3, "--task from-model, for a model that gets the targets too and returns its loss"),
        ("mine", {"loss": torch.zeros(())}, 3, "--task from-model"),
        ("from-model", (torch.zeros(2, 4),), 3, MINE),
        ("mine", [torch.zeros(2, 4)], 3, MINE),
        ("mine", torch.zeros(2, 4), 3, "4 not 3"),
        ("mine", torch.zeros(2, 4), 2, "4 not 2"),
        ("mine", torch.zeros(2, 4), 4, MINE),
        ("mine", torch.zeros(2, 5, 4), 5, "4 not 5"),
        ("mine", torch.zeros(4), 3, MINE),
        ("mine", torch.zeros(2, 5, 5, 4), 3, MINE),
    ],
)
def test_what_a_model_returns_says_what_to_change(task: str, output: Any, wanted: int, said: str) -> None:
    factories = SimpleNamespace(suggest_outputs=lambda config, source, found, number: f"{found} not {number}")
    spec: Any = SimpleNamespace(task=task, factories=factories, config=None, source=None)
    assert assemble._suggest_model(spec, [output, None], wanted).startswith(said)


class Rows(nn.Module):
    def forward(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows)


def test_replicas_take_no_lists_and_sparse_gradients_are_refused_where_they_learn() -> None:
    task: Any = SimpleNamespace(measure=lambda model, batch: [model(batch.inputs)])
    numbers, rows = torch.tensor([[0, 1]]), [torch.ones(2, requires_grad=True)]
    frozen = nn.Embedding(3, 2, sparse=True).requires_grad_(False)
    cases: list[tuple[str, nn.Module, Any, str]] = [
        ("dp", Rows(), rows, "--multi-gpu dp would cut each part of a batch that is a list of samples"),
        ("ddp", Rows(), rows, ""),
        ("dp", nn.Embedding(3, 2), numbers, ""),
        ("ddp", nn.Sequential(frozen, nn.Linear(2, 2)), numbers, ""),
        ("ddp", nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True)), numbers, "the embedding '0' has sparse=True: grad"),
    ]
    for strategy, model, inputs, said in cases:
        spec: Any = SimpleNamespace(placement=SimpleNamespace(strategy=strategy))
        with pytest.raises(RequestError, match=f"^{said}") if said else nullcontext():
            smoke_test_batch(spec, task, model, EACH, Batch(inputs, None, torch.arange(1), 0))


def test_a_model_that_was_not_tried_yet_is_tried_and_its_strategy_may_say_more(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, task, state, strategy, first, tried = (Mock() for _ in range(6))
    monkeypatch.setattr(assemble, "smoke_test_batch", tried)
    assert assemble._try_model(spec, task, state, strategy, first) == tried.return_value
    task.check_model.assert_called_once_with(state.model, state.precision)
    tried.assert_called_once_with(spec, task, state.model, state.precision, first.return_value)
    cause = ValueError("why")
    for reason in (cause, None):
        tried.side_effect = error = RequestError("what")
        error.__cause__ = reason
        with pytest.raises(RequestError):
            assemble._try_model(spec, task, state, strategy, first)
        told, again = strategy.explain_failure.call_args.args
        assert told is (reason or error)
        assert again() == task.measure(state.model, first.return_value)


@pytest.mark.parametrize("exact", [False, True])
def test_code_that_was_edited_is_named(exact: bool) -> None:
    def compare(manifest: dict[str, Any] | None) -> tuple[Any, str]:
        point = SimpleNamespace(manifest=manifest, checkpoint="run/checkpoints/step_7")
        config = SimpleNamespace(reproducibility=SimpleNamespace(exact=exact))
        spec: Any = SimpleNamespace(resume_point=point, config=config)
        return assemble._compare_code(spec, nn.Linear(1, 1))

    code = describe_code(nn.Linear(1, 1))
    assert compare(None) == compare({"settings": {}}) == compare({"settings": {"code": code}}) == (code, "")
    other = {"settings": {"code": {"layers": {"Linear": "another"}}}}
    problem = "the model's Linear changed since run/checkpoints/step_7 was written"
    if exact:
        with pytest.raises(RequestError) as refused:
            compare(other)
        assert refused.value.problem == f"--exact: {problem}"
    else:
        assert compare(other) == (code, f"{problem}: its weights, and the best so far, are of the code before")


def test_a_schedule_free_optimizer_is_in_its_mode_for_steps_and_has_no_second_average() -> None:
    model = nn.Linear(1, 1)
    for ema, average in (("off", None), ("0.9", "two")):
        optimizer = ScheduleFreeSGD(model.parameters(), 0.1)
        factories = SimpleNamespace(build_optimizer=lambda *_, made=optimizer: made, scheduler=None)
        config = SimpleNamespace(optimizer=SimpleNamespace(ema=ema))
        spec: Any = SimpleNamespace(factories=factories, config=config, plan=None)
        built: Any = SimpleNamespace(model=model, initial_weights=None, average=average)
        strategy: Any = None
        if average:
            with pytest.raises(RequestError, match="--ema can't be used with ScheduleFreeSGD: a schedule-free"):
                assemble._build_state(spec, built, EACH, strategy)
        else:
            assert assemble._build_state(spec, built, EACH, strategy).optimizer is optimizer
            assert optimizer.param_groups[0]["train_mode"]


class Own(Classification):
    def evaluate(self, *_: Any) -> Any:
        pytest.fail("it is only asked whether a task evaluates in its own way")


class Even(Own):
    supports_equal_passes = True


@pytest.mark.parametrize(
    ("kind", "sharded", "refused"),
    [(Own, True, True), (Own, False, False), (Even, True, False), (Classification, True, False)],
)
def test_a_task_that_evaluates_its_own_way_says_whether_passes_are_even(
    kind: type[Task], sharded: bool, refused: bool
) -> None:
    task = object.__new__(kind)
    strategy = SimpleNamespace(sharded=sharded, name="fsdp")
    factories = SimpleNamespace(build_task=lambda config, source: task)
    spec: Any = SimpleNamespace(task="mine", strategy=strategy, factories=factories, config=None, source=None)
    if refused:
        with pytest.raises(RequestError, match="--task mine has its own `evaluate`: with --multi-gpu fsdp all"):
            assemble._build_task(spec)
    else:
        assert assemble._build_task(spec) is task


@pytest.mark.parametrize(("same", "averages"), [(True, True), (False, False)])
def test_what_a_checkpoint_has_reaches_state_and_task(
    same: bool, averages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is longer now goes on, although the one before stopped early."""
    state, task, read = Mock(restore_warning=""), Mock(), Mock(return_value={"task": "its own"})
    state.average = Mock() if averages else None
    state.progress = SimpleNamespace(stopped_early=True, stale_epochs=3)
    monkeypatch.setattr(assemble, "_read_checkpoint", read)
    spec: Any = SimpleNamespace(resume_point=SimpleNamespace(checkpoint=None), same_length=same)
    assemble._restore_checkpoint(state, Mock(), task, spec, ALONE)
    read.assert_not_called()
    spec.resume_point.checkpoint = "there"
    assemble._restore_checkpoint(state, Mock(), task, spec, ALONE)
    own = {"model": state.model.state_dict.return_value}
    assert read.call_args.args[3] == own | ({"average": state.average.state_dict.return_value} if averages else {})
    state.restore.assert_called_once_with(read.return_value, "there")
    assert state.progress == SimpleNamespace(stopped_early=same, stale_epochs=3 if same else 0)
    task.load_state.assert_called_once_with("its own", ALONE)
    assert state.restore_warning is task.load_state.return_value


class Resting(nn.Linear):
    """As its factory leaves it: for use, not for training."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.eval()


def test_each_part_is_asked_in_its_turn_and_loaders_live_as_long_as_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, checked, attached, restored, closed = Mock(), list[Any](), list[Any](), Mock(), list[Any]()
    part.plan_notes.return_value = {"adapter": "mine"}
    monkeypatch.setattr(Classification, "check_model", lambda self, model, precision: checked.append(model))
    monkeypatch.setattr(Strategy, "attach_optimizer", lambda self, optimizer: attached.append(optimizer))
    monkeypatch.setattr(FromConfig, "check_restored", lambda self, plan: restored(plan.schedule))
    monkeypatch.setattr(Loader, "close", lambda self: closed.append(self))
    monkeypatch.setattr(assemble, "_compare_code", lambda spec, model: ({}, "edited"))
    monkeypatch.setattr(
        assemble, "_restore_checkpoint", lambda state, *_: setattr(state, "restore_warning", "and other data")
    )
    spec = prepare(tmp_path, model=f"{__name__}:Resting")
    made = build_components(spec, ALONE, [part])
    assert closed == []
    model = made.state.model
    assert part.mock_calls == [
        call.task_built(made.task), call.model_built(model), call.built(made), call.plan_notes()
    ]  # fmt: skip
    assert made.plan.notes["adapter"] == "mine"
    assert (checked, attached) == ([model], [made.state.optimizer])
    restored.assert_called_once_with(made.plan.schedule)
    assert made.state.restore_warning == "edited; and other data"
    assert model.training
    made.loaders.test = None
    made.loaders.close()
    assert closed == [made.loaders.train, made.loaders.val]


def test_the_weights_of_init_from_are_read_by_rank_0_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = nn.Linear(6, 3).state_dict()
    torch.save(weights, tmp_path / "weights.pt")

    def work(world: World) -> tuple[str, bool]:
        start: dict[str, Any] = {"init_from": str(tmp_path / "weights.pt"), "model": f"{__name__}:Resting"}
        made = build_components(prepare(tmp_path / "run", world, **start), world)
        return fingerprint(made.state.model.state_dict()), made.state.initial_weights is not None

    assert run_on_each_rank(2, work) == [(fingerprint(weights), True), (fingerprint(weights), False)]


def test_weights_that_a_first_pass_creates_are_not_drawn_as_those_before_it(tmp_path: Path) -> None:
    name = "tests.run.test_build_components"
    late: dict[str, Any] = {"model": f"{name}:Late", "data": f"{name}:Pictures"}
    made = build_components(prepare(tmp_path, **late), ALONE)
    first, later = (p.detach().contiguous().flatten()[:36] for p in made.state.model.parameters() if p.ndim == 4)
    assert abs(torch.corrcoef(torch.stack([first, later]))[0, 1]) < 0.9
