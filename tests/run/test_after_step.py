"""When `after_step` is called, what it gets, and what it may not do."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import DataConfig, TaskConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.run.after_step import AfterStep, find_after_step
from multigpu_cli.strategies.base import Single
from multigpu_cli.tasks.own_loss import FromModel
from tests.support.run_training import Ended, run_training
from tests.support.user_code import tensors
from tests.support.world import ALONE, CPU

MARK = 1000.0  # of a sample whose loss is NaN
TAKEN = torch.zeros(())
RUN: dict[str, Any] = {"task": "from-model", "global_batch_size": 20, "epochs": 3, "log_interval": 1, "save_dir": "run"}


class Counting(nn.Module):
    """Counts its calls, and the rows that it gets."""

    limit = 100  # samples in a micro-batch, beyond which memory does not suffice from the third step on
    calls: Tensor
    rows: Tensor
    copy: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("copy", torch.zeros(3, 6))
        self.register_buffer("beside", torch.zeros(3), persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.calls >= 2 and len(inputs) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory (played)")
        logits = self.net(inputs)
        weight = torch.where(inputs.max() == MARK, torch.nan, 1.0)
        return cross_entropy(logits, targets) * weight, logits

    def after_step(self, step: int, outputs: Tensor) -> None:
        assert not torch.is_grad_enabled()
        self.calls += 1
        self.rows += len(outputs)
        self.copy.copy_(self.net.weight)


class Greedy(Counting):
    limit = 10


class Watched(FromModel):
    """Notes what it is given."""

    def after_step(self, model: nn.Module, step: int) -> None:  # type: ignore[override]
        assert isinstance(model, Counting), "the network itself, not what DDP makes of it"
        assert model.calls == step, "the model's own method comes first"
        model.copy.mul_(2)


def with_mark(split: str, seed: int) -> TensorDataset:
    inputs, targets = tensors(split, seed).tensors
    if split == "train":
        inputs[7] = MARK
    return TensorDataset(inputs, targets)


def train(model: str, workers: int = 1, size: int = 20, **more: Any) -> tuple[Ended, dict[str, Tensor]]:
    ended = run_training(workers, **RUN | {"model": f"{__name__}:{model}", "batch_size": size} | more)
    assert ended.error == ""
    return ended, torch.load("run/last.pt", weights_only=True)["model"]


@pytest.mark.usefixtures("in_tmp_path")
def test_task_gets_the_plain_model_after_its_own_method() -> None:
    _, state = train("Counting", workers=2, size=7, task=f"{__name__}:Watched")
    assert (int(state["calls"]), int(state["rows"])) == (9, 180)
    assert torch.equal(state["copy"], 2 * state["net.weight"])


@pytest.mark.usefixtures("in_tmp_path")
def test_skipped_steps_do_not_call_it() -> None:
    ended, state = train("Counting", size=7, data=f"{__name__}:with_mark")
    assert ended.summary["steps"] == 9
    assert int(state["calls"]) == 6, "one step in each of three epochs is skipped"


@pytest.mark.usefixtures("in_tmp_path")
def test_step_repeated_after_out_of_memory_calls_it_once() -> None:
    ended, state = train("Greedy")
    assert "micro-batches of 10" in ended.summary["faults"][0]["action"]
    assert (int(state["calls"]), int(state["rows"])) == (9, 180)


@pytest.mark.usefixtures("in_tmp_path")
def test_moving_average_sees_what_it_leaves() -> None:
    train("Counting", ema="0.5")
    saved = torch.load("run/checkpoints/step_00000009/state.pt", weights_only=True)
    average = {name.removeprefix("module."): value for name, value in saved["average"].items()}
    assert torch.equal(average["calls"], saved["model"]["calls"])
    torch.testing.assert_close(average["copy"], average["net.weight"])


class Calling(FromModel):
    """Calls the network as often as a batch says."""

    def loss_sum(self, model: Callable[..., Any], batch: Any) -> Tensor:
        for _ in range(batch.calls):
            model()
        return TAKEN


class Method:
    """A network whose `after_step` is the given function."""

    def __init__(self, method: Callable[..., None]) -> None:
        self.model = type("Own", (Counting,), {"after_step": method})()

    def build(self, *, guard: bool = True) -> AfterStep:
        task = Calling(load_data_source(DataConfig(name=f"{tensors.__module__}:tensors"), 42), TaskConfig())
        built = find_after_step(task, self.model, Single(self.model), ALONE, guard=guard)
        assert built is not None
        return built

    def forward(self, after_step: AfterStep, number: int, returned: Any, calls: int = 1) -> None:
        self.model.forward = partial(lambda outputs: outputs, returned)
        batch: Any = SimpleNamespace(micro_batch_index=number, calls=calls)
        assert after_step.loss_sum(self.model, batch) is TAKEN

    def call(self, after_step: AfterStep, step: int = 1, skipped: Tensor = TAKEN) -> None:
        after_step.call(step, skipped, 42, (CPU,))


def without_outputs(self: nn.Module, step: int) -> None: ...


def with_outputs(self: nn.Module, step: int, outputs: Any) -> None:
    self.beside.outputs = outputs  # type: ignore[union-attr]


def test_outputs_are_not_recorded_for_a_method_without_them() -> None:
    own = Method(without_outputs)
    after_step = own.build()
    own.forward(after_step, 0, (loss(), torch.ones(2)))
    assert after_step._outputs == {}
    assert not own.model._forward_hooks


def pass_on(parts: list[Any]) -> Any:
    """What `after_step` gets if micro-batches return these things, of which the last one is the first to run."""
    own = Method(with_outputs)
    after_step = own.build()
    for number in range(len(parts) - 1, -1, -1):
        own.forward(after_step, number, parts[number])
        tree_map_only(Tensor, Tensor.zero_, parts[number])  # as a buffer is restored before the next micro-batch
    own.call(after_step)
    return own.model.beside.outputs


def loss() -> Tensor:
    return torch.tensor(1.5)


def test_outputs_join_rows_in_order_of_micro_batches() -> None:
    first = {"loss": loss(), "rows": torch.ones(2, 3), "norm": torch.tensor(5.0)}
    outputs = pass_on([first, {"loss": loss(), "rows": torch.full((1, 3), 2.0), "norm": torch.tensor(6.0)}])
    assert outputs.keys() == {"rows", "norm"}
    assert outputs["rows"].tolist() == [[1.0] * 3, [1.0] * 3, [2.0] * 3]
    assert outputs["norm"].tolist() == [5.0, 6.0]


@pytest.mark.parametrize(
    ("returned", "outputs"),
    [
        ((loss(), torch.arange(2)), [0, 1]),
        ((loss(), torch.arange(2), [torch.ones(1)]), ([0, 1], ([1.0],))),
        (loss(), ()),
    ],
)
def test_outputs_are_what_is_beside_the_loss(returned: Any, outputs: Any) -> None:
    assert tree_map_only(Tensor, Tensor.tolist, pass_on([returned])) == outputs


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([(loss(), "text")], "outputs of the model is a str"),
        ([{"loss": loss(), "a": {"b": 0.5}}], r"outputs\['a'\]\['b'\] of the model is a float"),
        ([(loss(), torch.ones(2, 3)), (loss(), torch.ones(2, 4))], "outputs differs in shape"),
        ([{"loss": loss(), "a": torch.ones(2)}, {"loss": loss(), "a": torch.arange(2)}], r"outputs\['a'\] differs in"),
        ([(loss(), torch.ones(2)), (loss(), {"a": torch.ones(2)})], "outputs differs in shape, dtype or type"),
    ],
)
def test_outputs_that_can_not_be_joined_are_refused_by_name(parts: list[Any], named: str) -> None:
    with pytest.raises(TrainingError, match=named):
        pass_on(parts)


@pytest.mark.parametrize("calls", [0, 2])
def test_outputs_of_several_calls_are_refused(calls: int) -> None:
    own = Method(with_outputs)
    with pytest.raises(RequestError, match=f"the task calls the model {calls} times"):
        own.forward(own.build(), 0, loss(), calls)


def test_method_with_other_parameters_is_refused() -> None:
    with pytest.raises(RequestError, match="after_step of the model") as error:
        Method(lambda self: None).build()
    assert "def after_step(self, step)" in str(error.value.remedy)


def test_method_of_a_layer_alone_is_refused() -> None:
    own = Method(without_outputs)
    task = Calling(load_data_source(DataConfig(name=f"{tensors.__module__}:tensors"), 42), TaskConfig())
    whole = nn.Sequential(own.model)
    with pytest.raises(RequestError, match="after_step of the layer 0 is not called"):
        find_after_step(task, whole, Single(whole), ALONE, guard=True)


def test_draws_depend_only_on_seed_and_step() -> None:
    drawn = []
    own = Method(lambda self, step: drawn.append(float(torch.rand(()))))
    after_step = own.build()
    for step in (1, 2, 1):
        torch.rand(step + len(drawn))
        own.call(after_step, step)
    assert drawn[0] == drawn[2] != drawn[1]


def replaces(self: Any, step: int) -> None:
    self.net.weight = nn.Parameter(self.net.weight * 2)


def points_elsewhere(self: Any, step: int) -> None:
    self.net.weight.data = self.net.weight * 2


def grows(self: Any, step: int) -> None:
    self.copy = torch.cat([self.copy, self.copy])


def writes_unsaved(self: Any, step: int) -> None:
    self.beside += 1


def rebinds_unsaved(self: Any, step: int) -> None:
    self.beside = torch.ones(3)


def anneals(self: Any, step: int) -> None:
    self.limit = step


@pytest.mark.parametrize(
    ("method", "named"),
    [
        (replaces, "replaces parameters, .*: net.weight"),
        (points_elsewhere, "replaces parameters, .*: net.weight"),
        (grows, "buffers by others of another shape: copy"),
        (writes_unsaved, "changes beside, which no checkpoint contains"),
        (rebinds_unsaved, "changes beside, which no checkpoint contains"),
        (anneals, r"changes model \(Own\) \.limit, which no checkpoint contains"),
    ],
)
def test_changes_that_no_checkpoint_has_are_refused(method: Callable[..., None], named: str) -> None:
    own = Method(method)
    with pytest.raises(TrainingError, match=named):
        own.call(own.build(), step=7)


def test_attributes_are_not_examined_without_the_guard() -> None:
    own = Method(anneals)
    own.call(own.build(guard=False), step=7)
    assert own.model.limit == 7
