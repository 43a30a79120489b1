"""The guard finds each planted fault with its name and location, is quiet about right code, and restores all state."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from multigpu_cli.data.loader import Batch
from multigpu_cli.run.guard.examine import Examination, Subject, examine
from multigpu_cli.run.guard.findings import Refusal
from multigpu_cli.runtime.seeding import seed_everything
from tests.run.guard import planted_models as planted

Loss = Callable[[Any, Tensor], Tensor]
LossSum = Callable[[Any, Batch], Tensor]


def sum_entropies(outputs: Any, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="sum")


def look(model: nn.Module, loss: Loss = sum_entropies, **others: Any) -> Examination:
    """Examine a model on eight samples, the first ones of sixteen."""
    draw = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(16, 8, generator=draw), torch.randint(0, 4, (16,), generator=draw)
    return examine_samples(model, inputs, targets, loss, **others)


def examine_samples(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, *, loss_sum: LossSum | None = None, **others: object
) -> Examination:
    """Examine a model on the first eight of sixteen samples."""
    halves = [Batch(inputs[s], targets[s], torch.arange(16)[s], 0) for s in (slice(8), slice(8, 16))]
    subject = Subject(
        model=model,
        batch=halves[0],
        load_other_batch=lambda: halves[1],
        loss_sum=loss_sum or (lambda network, batch: loss(network(batch.inputs), batch.targets)),
        backward=Tensor.backward,
        seed=lambda: seed_everything(7),
        autocast=nullcontext,
        evaluate=lambda network, batch: network(batch.inputs),
        others=others,
    )
    return examine(subject)


@pytest.mark.parametrize(
    ("model", "refusal", "words"),
    [
        (planted.Teacher, Refusal.SEVERAL, "parameters teacher.weight, teacher.bias (Linear, planted_models.py:"),
        (planted.Rebinding, Refusal.SEVERAL, "parameters teacher.weight (Linear"),
        (planted.Replacing, Refusal.SEVERAL, "parameters teacher.weight (Linear"),
        (planted.InBackwardHook, Refusal.SEVERAL, "parameters teacher.weight (Linear, planted_models.py:"),
        (planted.DataDependentScale, Refusal.SEVERAL, "parameters scale (DataDependentScale, planted_models.py:"),
        (planted.Renormalizing, Refusal.SEVERAL, "parameters table.weight (Embedding, planted_models.py:"),
        (planted.Projecting, Refusal.NEVER, "projects the weights last.weight (Linear, planted_models.py:"),
        (planted.Counting, Refusal.SEVERAL, "model (Counting) .passes, and the loss depends on it"),
        (planted.CountingInClass, Refusal.SEVERAL, "model (CountingInClass) .passes"),
        (planted.CountingForNobody, Refusal.EXACT, "model (CountingForNobody) .passes"),
        (planted.Listing, Refusal.EXACT, "model (Listing) .losses"),
        (planted.Remembering, Refusal.SEVERAL, "model (Remembering) .hidden"),
        (planted.OwnGenerator, Refusal.EXACT, "model (OwnGenerator) .numbers"),
        (planted.OwnPythonGenerator, Refusal.EXACT, "model (OwnPythonGenerator) .numbers"),
        (planted.OwnTorchGenerator, Refusal.EXACT, "model (OwnTorchGenerator) .numbers"),
        (planted.GlobalGenerator, Refusal.EXACT, "model (GlobalGenerator) .global GLOBAL"),
        (planted.Unseeded, Refusal.SEVERAL, "different loss the second time"),
        (planted.NumpyInCheckpoint, Refusal.NEVER, "backward draws"),
        (planted.Gathering, Refusal.EXACT, "would communicate by itself: all_reduce (planted_models.py:"),
        (
            planted.ScalingByRank,
            Refusal.EXACT,
            "depends on the rank or the number of workers, for which planted_models",
        ),
        (planted.Observing, Refusal.SEVERAL, "least or greatest value so far in the buffers low, high (Observing"),
        (planted.GreatestSoFar, Refusal.NEVER, "least or greatest value so far in the buffers greatest (GreatestSoFar"),
        (planted.Ring, Refusal.SEVERAL, "overwrites a part of the buffers queue (Ring, planted_models.py:"),
        (planted.Shifting, Refusal.SEVERAL, "overwrites a part of the buffers queue (Shifting"),
        (planted.Mixing, Refusal.NEVER, "the loss of 8 samples is "),
        (planted.InEvaluation, Refusal.NEVER, "an evaluation changes mean (InEvaluation, planted_models.py:"),
        (planted.WeightsInEvaluation, Refusal.SEVERAL, "an evaluation changes last.bias (Linear, planted_models.py:"),
    ],
)
def test_guard_finds_each_fault_once_with_its_location(
    model: Callable[[], nn.Module], refusal: Refusal, words: str
) -> None:
    torch.manual_seed(0)
    [finding] = look(model()).findings
    assert words in finding.problem
    assert finding.refusal is refusal


def mean_entropy(outputs: Any, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets)


def entropy_of_sums(outputs: Any, targets: Tensor) -> Tensor:
    """A sum that is taken for a mean."""
    return sum_entropies(outputs, targets) * len(targets)


def weighted_mean(outputs: Any, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, torch.tensor([1.0, 9.0, 0.1, 5.0])) * len(targets)


def contrast(outputs: Any, targets: Tensor) -> Tensor:
    rows = normalize(outputs, dim=1)
    return cross_entropy(rows @ rows.roll(1, 1).T, torch.arange(len(rows)), reduction="sum")


@pytest.mark.parametrize(
    ("loss", "reason", "remedy"),
    [
        (mean_entropy, "loss_sum returns a mean", "reduction='sum'"),
        (entropy_of_sums, "a sum over the micro-batch is taken for its mean", "reduction='mean'"),
        (weighted_mean, "its own weights, negatives or statistics", "units are the weights"),
        (contrast, "its own weights, negatives or statistics", "rows and loss"),
    ],
)
def test_guard_warns_of_losses_that_do_not_add_up(loss: Loss, reason: str, remedy: str) -> None:
    torch.manual_seed(0)
    [finding] = look(planted.Net(), loss).findings
    assert "that of their halves together" in finding.problem
    assert reason in finding.reason
    assert remedy in finding.remedy
    assert (finding.refusal, finding.only_several) == (Refusal.NEVER, True)


def test_guard_names_the_module_that_mixes_samples() -> None:
    torch.manual_seed(0)
    [finding] = look(planted.Mixing()).findings
    assert "the output of center (BatchCenter) for a sample" in finding.reason


class CallingTask:
    """A task that calls a method of the model."""

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        return sum_entropies(outputs, targets)

    def loss_sum(self, model: Any, batch: Batch) -> Tensor:
        assert model.training
        assert len(list(model.parameters())) == 4
        return self(model.last(model.first(batch.inputs)), batch.targets)


def test_guard_warns_of_a_task_that_calls_parts_of_the_model() -> None:
    task = CallingTask()
    [finding] = look(planted.Net(), task, loss_sum=task.loss_sum, task=task).findings
    assert "the task uses model.last (test_examine.py:" in finding.problem
    assert "model.first (test_examine.py:" in finding.problem
    assert finding.refusal is Refusal.NEVER


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", planted.RIGHT)
def test_guard_is_quiet_about_right_code(name: str) -> None:
    torch.manual_seed(0)
    examination = look(planted.RIGHT[name]())
    assert (examination.findings, examination.failure) == ([], "")


def read_generators() -> list[object]:
    return [random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()]


@pytest.mark.parametrize(
    "model",
    [
        planted.Teacher,
        planted.Rebinding,
        planted.Replacing,
        planted.DataDependentScale,
        planted.Projecting,
        planted.Observing,
        planted.Shifting,
        planted.Mixing,
        planted.InEvaluation,
        planted.WeightsInEvaluation,
        planted.Caching,
        planted.Checkpointed,
        planted.Failing,
    ],
)
def test_examine_restores_weights_buffers_modes_and_generators(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    network = model()
    network.last.eval()  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    parameters, generators = list(network.parameters()), read_generators()
    look(network)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(one is other for one, other in zip(network.parameters(), parameters, strict=True))
    assert all(parameter.grad is None for parameter in parameters)
    assert (network.training, network.last.training) == (True, False)  # type: ignore[union-attr]
    assert read_generators() == generators


def test_examine_restores_attributes_and_own_generators() -> None:
    torch.manual_seed(0)
    counting, in_class, listing, remembering = (
        planted.Counting(), planted.CountingInClass(), planted.Listing(), planted.Remembering()
    )  # fmt: skip
    losses = listing.losses["all"]
    owned, python, of_torch = planted.OwnGenerator(), planted.OwnPythonGenerator(), planted.OwnTorchGenerator()
    for model in (counting, in_class, listing, remembering, owned, python, of_torch):
        look(model)
    assert "passes" not in vars(counting)
    assert (counting.passes, in_class.passes, remembering.hidden) == (0, 0, None)
    assert listing.losses["all"] is losses
    assert losses == []
    assert owned.numbers.random() == numpy.random.default_rng(0).random()
    assert python.numbers.random() == random.Random(0).random()
    assert of_torch.numbers.get_state().equal(torch.Generator().manual_seed(0).get_state())


class CountingLoss(nn.Module):
    """A criterion that ramps up."""

    calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return sum_entropies(outputs, targets) * min(1.0, self.calls / 10)


def make_closure() -> Loss:
    calls = 0

    def ramp(outputs: Any, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return sum_entropies(outputs, targets) * min(1.0, calls / 10)

    return ramp


class CountingTask:
    """The attributes of a task, of which every task has `source`."""

    def __init__(self) -> None:
        self.source, self.calls = object(), 0

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        self.calls += 1
        return sum_entropies(outputs, targets) * min(1.0, self.calls / 10)


@pytest.mark.parametrize(
    ("loss", "name", "words"),
    [
        (CountingLoss(), "criterion", "criterion (CountingLoss) .calls"),
        (make_closure(), "criterion", "criterion (ramp) .calls"),
        (CountingTask(), "task", "task (CountingTask) .calls"),
    ],
)
def test_guard_finds_state_of_task_criterion_and_closure(loss: Loss, name: str, words: str) -> None:
    torch.manual_seed(0)
    for _ in range(2):  # restored, so found again
        [finding] = look(planted.Net(), loss, **{name: loss}).findings
        assert words in finding.problem
        assert finding.refusal is Refusal.SEVERAL


def test_examine_reports_a_pass_that_fails_with_its_location() -> None:
    examination = look(planted.Failing())
    assert examination.failure.startswith("a second forward pass of 8 samples raised KeyError (planted_models.py:")
    assert examination.findings == []


def test_examine_raises_errors_of_too_little_memory_again() -> None:
    def exhaust(outputs: Any, targets: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        look(planted.Net(), exhaust)


def test_examine_leaves_torch_distributed_as_it_was() -> None:
    before = dict(vars(torch.distributed))
    look(planted.ScalingByRank())
    look(planted.Gathering())
    assert dict(vars(torch.distributed)) == before
