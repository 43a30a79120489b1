"""Weights of classes: what they are, and which samples they choose."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.class_weights import (
    count_repeats,
    draw_samples,
    read_labels,
    resolve_class_weights,
    resolve_sample_weights,
)
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import BatchPlan
from tests.support.uneven_classes import SHARES, Items, tensors
from tests.support.world import CPU

SOURCE = DataSource(train=tensors("train", 1), val=None, test=None, input_shape=(1, 8, 8), num_classes=3)
NAMED = replace(SOURCE, class_names=("cat", "dog", "owl"))


class Unlisted(Dataset[Any]):
    """Nobody knows the labels of its samples."""

    def __len__(self) -> int:
        return 60


def resolve(wanted: Any, source: DataSource = SOURCE) -> list[float]:
    found: list[float] = resolve_class_weights(wanted, source, "task.class_weights").tolist()
    return found


def test_balanced_is_what_scikit_learn_computes() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = numpy.repeat([0, 1, 2], SHARES)
    expected = compute_class_weight("balanced", classes=numpy.arange(3), y=labels)
    assert resolve("balanced") == pytest.approx(expected)
    assert resolve("balanced", replace(SOURCE, train=Items("train", 1))) == pytest.approx(expected)


class Changed(Items):
    """Its labels are changed on the way out, as torchvision's datasets do it."""

    def __init__(self, target_transform: Any) -> None:
        super().__init__("train", 1)
        self.target_transform = target_transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, label = super().__getitem__(index)
        return inputs, self.target_transform(label)


def test_a_target_transform_is_followed() -> None:
    from torchvision.datasets import FakeData, VisionDataset

    assert "target_transform" in vars(VisionDataset(target_transform=int)), "as torchvision calls it"
    assert FakeData(target_transform=int).target_transform is int
    merged = replace(SOURCE, train=Subset(Changed((0, 1, 1).__getitem__), range(60)), num_classes=2)
    assert resolve("balanced", merged) == pytest.approx([60 / (2 * 40), 60 / (2 * 20)])
    tensors_of_it = Changed(torch.tensor)
    tensors_of_it.targets = torch.tensor(tensors_of_it.targets)  # type: ignore[assignment]
    assert resolve("balanced", replace(SOURCE, train=tensors_of_it)) == resolve("balanced")
    with pytest.raises(RequestError, match=r"target_transform raised KeyError in test_class_weights\.py:\d+: 2\n"):
        resolve("balanced", replace(SOURCE, train=Changed(lambda label: {0: 0, 1: 1}[label])))


def test_labels_that_do_not_count_have_no_weight() -> None:
    """-100, as torch ignores it: not counted, and with data.sample_weights never drawn."""
    some = Items("train", 1)
    some.targets[:20] = [-100] * 20
    source = replace(SOURCE, train=some)
    assert resolve("balanced", source) == pytest.approx([40 / (3 * 20), 40 / (3 * 15), 40 / (3 * 5)])
    for wanted in ("balanced", (1.0, 1.0, 1.0)):
        weights = resolve_sample_weights(wanted, source, "data.sample_weights")
        assert (weights > 0).tolist() == [False] * 20 + [True] * 40
    some.targets[30] = -1
    with pytest.raises(RequestError, match="the labels of the training samples reach from -1 to 2, and there are 3"):
        resolve("balanced", source)


def test_weights_as_given() -> None:
    assert resolve((1.0, 2.0, 3.5)) == [1, 2, 3.5]
    assert resolve({"2": 5.0}) == [1, 1, 5]
    assert resolve({"dog": 5.0, "owl": 0.0}, NAMED) == [1, 5, 0]


@pytest.mark.parametrize(
    ("wanted", "source", "message"),
    [
        ((1.0, 2.0), SOURCE, "task.class_weights: 2 weights for 3 classes"),
        ((0.0, 0.0, 0.0), SOURCE, "task.class_weights: no class has a weight above 0"),
        ({"dog": 0.0, "cat": 0.0, "owl": 0.0}, NAMED, "task.class_weights: no class has a weight above 0"),
        ({"dgo": 2.0}, NAMED, "the data has no class 'dgo'\n  try: did you mean 'dog'"),
        ("balanced", replace(SOURCE, train=Unlisted()), "loaded\n  try: give the dataset an attribute `targ"),
    ],
)
def test_weights_for_other_classes_are_refused(wanted: Any, source: DataSource, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        resolve(wanted, source)
    assert message in str(refused.value)


def test_labels_of_parts_of_a_dataset() -> None:
    part: Dataset[Any] = Subset(Items("train", 1), [0, 59, 41])
    labels = read_labels(part)
    assert labels is not None
    assert labels.tolist() == [0, 2, 1]


def test_samples_come_as_often_as_their_weights_say() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0]).double().repeat(2500)
    drawn = draw_samples(weights, seed=1, epoch=0)
    counts = Counter((drawn % 4).tolist())
    assert counts[0] == counts[3] == 0
    assert counts[2] / counts[1] == pytest.approx(3, rel=0.1)
    assert torch.equal(drawn, draw_samples(weights, seed=1, epoch=0))
    assert not torch.equal(drawn, draw_samples(weights, seed=1, epoch=1))
    assert not torch.equal(drawn, draw_samples(weights, seed=2, epoch=0))


def test_repeats_are_counted_in_order() -> None:
    assert count_repeats(torch.tensor([7, 2, 7, 7, 2, 0])).tolist() == [0, 0, 1, 2, 1, 0]


@pytest.mark.parametrize("split", [tensors("train", 1), Items("train", 1)], ids=["in memory", "one by one"])
def test_any_number_of_workers_serves_the_same_samples(split: Dataset[Any]) -> None:
    """Of all classes alike; a sample that comes again is augmented differently, and keeps its number."""

    def noise(inputs: Tensor, draws: KeyedRandom) -> Tensor:
        return inputs + draws.uniform(0).view(-1, 1, 1, 1)

    source = replace(SOURCE, train=split, augment=noise)
    config = DataConfig(num_workers=0, sample_weights="balanced")
    plan = BatchPlan(samples=60, micro_batch=5, global_batch=20, workers=1)

    def served(workers: int) -> list[Batch]:
        loaders = [Loader(split, source, config, device=CPU, seed=3) for _ in range(workers)]
        shared = replace(plan, workers=workers)
        epochs = [loader.epoch(shared, 1, 0, rank, 1) for rank, loader in enumerate(loaders)]
        steps = [[list(work) for _, work in epoch] for epoch in epochs]
        return [batch for ranks in zip(*steps, strict=True) for batches in ranks for batch in batches]

    one, three = served(1), served(3)
    assert len(one) == len(three) == 12
    for here, there in zip(one, three, strict=True):
        assert torch.equal(here.inputs, there.inputs)
        assert torch.equal(here.sample_indices, there.sample_indices)
    numbers = torch.cat([batch.sample_indices for batch in one])
    labels = torch.cat([batch.targets for batch in one])
    assert int(numbers.max()) < 60
    assert torch.equal(labels, tensors("train", 1).tensors[1][numbers])
    assert min(Counter(labels.tolist()).values()) > 12, "a third of 60 each, give or take"
    inputs, most = torch.cat([batch.inputs for batch in one]), int(numbers.bincount().argmax())
    again = inputs[numbers == most]
    assert len(again) > 2
    assert len({each.sum().item() for each in again}) == len(again)


def test_the_loss_is_torchs_with_weights() -> None:
    from torch.nn.functional import cross_entropy

    from multigpu_cli.config.schema import TaskConfig
    from multigpu_cli.tasks.supervised import Classification

    task = Classification(SOURCE, TaskConfig(class_weights=(1.0, 2.0, 4.0), label_smoothing=0.1))
    logits, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    batch = Batch(logits, targets, torch.arange(6), 0)
    expected = cross_entropy(logits, targets, torch.tensor([1.0, 2.0, 4.0]), reduction="sum", label_smoothing=0.1)
    assert torch.equal(task.loss_sum(lambda inputs: inputs, batch), expected)
    plain = cross_entropy(logits.double(), targets, reduction="sum")
    assert torch.equal(task.measure(torch.nn.Identity(), batch).loss_sum, plain)


def test_an_in_memory_source_needs_one_label_a_sample() -> None:
    vectors = TensorDataset(torch.zeros(4, 2), torch.zeros(4, 3))
    with pytest.raises(RequestError, match="classes of the training samples are not known"):
        resolve("balanced", replace(SOURCE, train=vectors))
