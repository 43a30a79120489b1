"""Each metric is exact: the same bits on any number of workers, and the number that another library finds."""

from math import isnan, nan
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import DataConfig, MetricConfig, TaskConfig
from multigpu_cli.data.loader import Loader
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.metrics import load
from multigpu_cli.metrics.builtin import AUROC, R2, MacroAccuracy, MacroF1, compute_top5
from multigpu_cli.metrics.load import load_metrics
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.tasks.base import Task
from multigpu_cli.tasks.supervised import Classification, Regression
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE, CPU

HERE = "tests.metrics.test_meter"
NAMES = (
    "macro_f1",
    "macro_accuracy",
    "top5_accuracy",
    *(f"{HERE}:{name}" for name in ("lead", "share", "Order", "Real")),
)


def lead(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.gather(1, targets.unsqueeze(1)).squeeze(1)


def share(outputs: Tensor, targets: Tensor) -> tuple[Tensor, numpy.ndarray]:
    """A ratio of sums, of which a batch may have nothing."""
    return (outputs.argmax(1) == targets) & (targets == 1), (targets == 1).numpy()


class Order:
    """Its number depends on the order of the samples."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[float] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen += (outputs[:, 0] * (1 + targets)).tolist()

    def compute(self) -> Tensor:
        found = 0.0
        for value in self.seen:
            found = (found + value) * 0.9
        return torch.tensor(found, dtype=torch.float64)


class Real:
    """Sums that are no whole numbers."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([outputs.sum(), outputs.square().sum()])

    def compute(self, sums: Tensor) -> float:
        return float(sums[1] / sums[0].abs())


def make_samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 7, generator=generator), torch.randint(7, (count,), generator=generator)


def make_task(count: int, names: tuple[str, ...] = NAMES) -> tuple[Task, Loader]:
    test = TensorDataset(*make_samples(count))
    source = DataSource(train=test, val=None, test=test, input_shape=(7,), num_classes=7)
    task = Classification(source, TaskConfig())
    task.own_metrics = load_metrics(MetricConfig(names=names), source, "classification")
    return task, Loader(test, source, DataConfig(), device=CPU, seed=1)


def evaluate(world: World) -> list[dict[str, str]]:
    """97 samples, and 5, of which some workers have none; with all digits, since NaN is not equal to itself."""
    torch.manual_seed(1)
    model, found = nn.Linear(7, 7), []
    for count in (97, 5):
        task, loader = make_task(count)
        metrics = task.evaluate(model, loader, world, Precision("off", CPU), 8).metrics
        found.append({name: repr(value) for name, value in metrics.items()})
    return found


def test_any_number_of_workers_finds_the_same_bits() -> None:
    alone = evaluate(ALONE)
    assert set(alone[0]) == {"loss", "accuracy", "macro_f1", "macro_accuracy", "top5_accuracy", "lead", "share"} | {
        "order",
        "real",
    }
    assert run_on_each_rank(3, evaluate) == [alone] * 3


def test_numbers_are_those_of_their_definition() -> None:
    torch.manual_seed(1)
    model = nn.Linear(7, 7)
    task, loader = make_task(97)
    found = task.evaluate(model, loader, ALONE, Precision("off", CPU), 8).metrics
    inputs, targets = task.source.test.tensors  # type: ignore[union-attr]
    outputs = model(inputs).detach()
    predicted = outputs.argmax(1)
    order = Order()
    order.update(outputs, targets)
    right = predicted == targets
    expected = {
        "macro_f1": reference.f1_score(targets, predicted, average="macro"),
        "macro_accuracy": reference.balanced_accuracy_score(targets, predicted),
        "top5_accuracy": reference.top_k_accuracy_score(targets, outputs, k=5),
        "lead": float(lead(outputs, targets).double().mean()),
        "share": float(right[targets == 1].double().mean()),
        "order": float(order.compute()),
    }
    assert {name: found[name] for name in expected} == {name: pytest.approx(each) for name, each in expected.items()}


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30), st.integers(1, 9))
def test_auroc_is_that_of_scikit_learn(samples: list[tuple[int, bool]], size: int) -> None:
    scores, targets = (torch.tensor(column) for column in zip(*samples, strict=True))
    metric = AUROC()
    for at in range(0, len(scores), size):
        part = scores[at : at + size].float()
        metric.update(torch.stack([-2 * part, -part], 1), targets[at : at + size].long())
    both = 0 < int(targets.sum()) < len(targets)
    expected = reference.roc_auc_score(targets, scores) if both else float("nan")
    assert metric.compute() == pytest.approx(expected, nan_ok=True)


def test_auroc_keeps_its_digits_where_classes_are_rare() -> None:
    """200,000 samples and five of the other class: in 32 bits their ranks are not."""
    generator = torch.Generator().manual_seed(5)
    targets = (torch.arange(200_005) < 200_000).long()
    scores = torch.randn(len(targets), generator=generator, dtype=torch.float64)
    metric = AUROC()
    metric.update(torch.stack([-scores, 2 * scores], 1), targets)
    assert metric.compute() == pytest.approx(reference.roc_auc_score(targets, scores), rel=1e-14)


class Spoilt(nn.Linear):
    """One sample's first output is not a number."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        outputs[(inputs == SPOILT).all(1), 0] = nan
        return outputs


SPOILT = make_samples(97)[0][90]


def test_of_outputs_that_are_no_numbers_nothing_is_a_number() -> None:
    """On one worker, and where only the last of three has such a sample."""

    def work(world: World) -> dict[str, float]:
        names = ("macro_f1", "macro_accuracy", "top5_accuracy", f"{HERE}:Halves")
        task, loader = make_task(97, names)
        torch.manual_seed(1)
        return task.evaluate(Spoilt(7, 7), loader, world, Precision("off", CPU), 8).metrics

    for found in (work(ALONE), *run_on_each_rank(3, work)):
        assert found.keys() == {"loss", "accuracy", "macro_f1", "macro_accuracy", "top5_accuracy", "halves"}
        assert all(map(isnan, found.values())), found


class Halves(AUROC):
    """Of the first two classes, against all others."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs[:, :2], (targets > 3).long())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_means_over_classes_are_those_of_scikit_learn(samples: list[tuple[int, int]]) -> None:
    predicted, targets = (torch.tensor(column) for column in zip(*samples, strict=True))
    outputs = nn.functional.one_hot(predicted, 4).float()
    f1, accuracy = MacroF1(), MacroAccuracy()
    assert f1.compute(f1.sums(outputs, targets)) == pytest.approx(
        reference.f1_score(targets, predicted, average="macro")
    )
    recalls = [(predicted[targets == name] == name).double().mean() for name in targets.unique()]
    assert accuracy.compute(accuracy.sums(outputs, targets)) == pytest.approx(float(torch.stack(recalls).mean()))


def test_r2_and_top5_take_what_they_can_compare_only() -> None:
    metric = R2()
    outputs, targets = torch.randn(9, 2), torch.randn(9, 2)
    metric.update(outputs[:4], targets[:4])
    metric.update(outputs[4:], targets[4:])
    assert metric.compute() == pytest.approx(reference.r2_score(targets, outputs))
    flat = R2()
    flat.update(outputs[:, 0], targets[:, 0])
    assert flat.compute() == pytest.approx(reference.r2_score(targets[:, 0], outputs[:, 0]))
    classes = torch.ones(9, dtype=torch.int64)
    for other in (targets[:, 0], torch.ones(9, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="one shape"):
            metric.update(outputs, other)
    for unfit in ((outputs, targets[:, 0]), (outputs, classes[:8]), (outputs.unsqueeze(1), classes)):
        with pytest.raises(ValueError, match="class numbers"):
            compute_top5(*unfit)
        with pytest.raises(ValueError, match="class numbers"):
            MacroF1().sums(*unfit)
    for unfit in ((outputs[:, 0], classes), (torch.ones(9, 3), classes), (outputs, classes[:8])):
        with pytest.raises(ValueError, match="two classes only"):
            AUROC().update(*unfit)


def test_a_regression_is_compared_in_its_own_unit() -> None:
    inputs = torch.randn(20, 3)
    test = TensorDataset(inputs, 100 + 50 * inputs.sum(1))
    scale = {"target_scale": (100.0, 50.0)}
    source = DataSource(train=test, val=None, test=test, input_shape=(3,), num_classes=0, **scale)  # type: ignore[arg-type]
    task = Regression(source, TaskConfig())
    task.own_metrics = load_metrics(MetricConfig(names=(f"{HERE}:distance",)), source, "regression")
    model = nn.Linear(3, 1)
    found = task.evaluate(
        model, Loader(test, source, DataConfig(), device=CPU, seed=1), ALONE, Precision("off", CPU), 8
    )
    assert found.metrics["distance"] == pytest.approx(found.metrics["mae"])


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs()


class NoNumber(Order):
    def compute(self) -> Any:
        return torch.zeros(2)


class Broken(Order):
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        if len(outputs) < 8:
            raise ValueError("too few")


class Ragged(Real):
    """Other sums for another batch, which each of two ranks has."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.ones(len(outputs), dtype=torch.int64)


class Summed(Real):
    def __init__(self, found: Any) -> None:
        self.found = found

    def sums(self, outputs: Tensor, targets: Tensor) -> Any:
        return self.found


@pytest.mark.parametrize("found", ["no number", torch.ones(2, 2), torch.ones(2, dtype=torch.complex64)], ids=str)
def test_sums_are_one_row_of_real_numbers(found: Any) -> None:
    metric = load.SummedMetric("own", "own", lambda: Summed(found))
    metric.begin(1, ALONE)
    with pytest.raises(TrainingError, match="own: sums returned "):
        metric.add(0, *make_samples(1), 1)


class Mixed(Real):
    """Whole numbers for the last batch alone."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = super().sums(outputs, targets)
        return found if len(outputs) == 8 else found.long()


@pytest.mark.parametrize(
    ("name", "samples", "words"),
    [
        ("NoNumber", 21, r"compute returned float32 \(2,\), not a number"),
        ("Broken", 21, "update raised ValueError in test_meter.py"),
        ("Ragged", 13, "sums returned 5 numbers for some batches and 8 for others"),
        ("Ragged", 29, r"sums returned int64 \(5,\)"),  # the second rank has both sizes
        ("Mixed", 13, "sums returned whole numbers for some batches only"),  # the second rank's
        ("Mixed", 29, "sums returned whole numbers for some batches only"),  # the second rank has both kinds
    ],
)
def test_an_error_of_the_whole_is_known_to_all(name: str, samples: int, words: str) -> None:
    def work(world: World) -> str:
        task, loader = make_task(samples, (f"{HERE}:{name}",))
        try:
            task.evaluate(nn.Linear(7, 7), loader, world, Precision("off", CPU), 8)
        except TrainingError as error:
            return str(error)
        return ""

    found = run_on_each_rank(2, work)
    assert found[0] == found[1]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found[0])


class Twice(Classification):
    def measure(self, model: nn.Module, batch: Any) -> Any:
        super().measure(model, batch)
        return super().measure(model, batch)


@pytest.mark.parametrize(("size", "messages"), [(2**10, [1, 2, 4, 8, 5]), (2**22, [1] * 20)])
def test_small_batches_travel_together_and_large_ones_alone(
    size: int, messages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(load, "send_object", lambda world, batches: sent.append(len(batches)) or size)
    monkeypatch.setattr(load.OrderedMetric, "compute_on_main_rank", lambda metric, world, work: nan)
    metric, second, moves = load.OrderedMetric("order", "order", Order), World(CPU, 1, 2), list[int]()
    metric.begin(40, second)
    for number in range(20, 40):
        metric.add(number, *make_samples(1), 1)
    metric.reduce(second, lambda: moves.append(0))
    assert (sent, len(moves)) == (messages, len(messages))


def test_rank_0_sees_the_batches_of_the_others_after_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = iter([[3], [4, 5]])
    monkeypatch.setattr(load, "receive_object", lambda world, source: [make_pair(number) for number in next(sent)])
    monkeypatch.setattr(load.OrderedMetric, "compute_on_main_rank", lambda metric, world, compute: compute())
    metric, main, moves = load.OrderedMetric("order", "order", Order), World(CPU, 0, 2), list[int]()
    metric.begin(5, main)
    for number in (1, 2):
        metric.add(number, *make_pair(number), 1)
    metric.reduce(main, lambda: moves.append(0))
    assert (metric._object.seen, len(moves)) == ([1.0, 2.0, 3.0, 4.0, 5.0], 2)


def make_pair(number: int) -> tuple[Tensor, Tensor]:
    return torch.full((1, 1), float(number)), torch.zeros(1)


def test_tensors_and_plain_values_can_be_sent_to_rank_0() -> None:
    metric, learning = load.OrderedMetric("order", "own", Order), torch.ones(1, requires_grad=True)
    sent = metric._copy_to_host({1: (learning, None), "plain": [True, 2, 0.5, "word"]})
    assert sent == {"1": [learning, None], "plain": [True, 2, 0.5, "word"]}
    assert not sent["1"][0].requires_grad
    with pytest.raises(TrainingError, match="--metric own: the outputs hold a object, which can't be sent"):
        metric._copy_to_host([object()])


def test_arguments_that_do_not_fit_are_refused_before_the_first_evaluation() -> None:
    with pytest.raises(RequestError, match="Summed"):
        make_task(9, (f"{HERE}:Summed",))


def test_a_task_with_two_passes_has_no_outputs_to_compare() -> None:
    task, loader = make_task(9)
    twice = Twice(task.source, TaskConfig())
    twice.own_metrics = task.own_metrics
    with pytest.raises(RequestError, match="calls the model 2 times for a batch"):
        twice.evaluate(nn.Linear(7, 7), loader, ALONE, Precision("off", CPU), 8)
