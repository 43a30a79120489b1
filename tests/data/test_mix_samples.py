"""Mixup and CutMix: a function of seed, epoch, sample and its micro-batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from multigpu_cli.data.images.mixing import SampleMixer
from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.errors import RequestError

COUNT = 4000


def draws(count: int = COUNT, epoch: int = 0) -> KeyedRandom:
    return KeyedRandom(1, epoch, torch.arange(count))


def mix_pairs(mixup: float | None, cutmix: float | None, count: int = COUNT, size: int = 8) -> tuple[Tensor, Tensor]:
    """Images whose pixels are all the number of their class, of as many classes as samples in a micro-batch."""
    labels = torch.arange(count) % size
    images = labels.float().view(-1, 1, 1, 1).expand(count, 1, 10, 10)
    return SampleMixer(mixup, cutmix, size)(images, labels, draws(count), size)


def test_mixup_takes_as_much_of_the_target_as_of_the_image() -> None:
    images, targets = mix_pairs(0.4, None)
    assert torch.allclose(targets.sum(1), torch.ones(COUNT))
    assert torch.allclose(images[:, 0, 5, 5], targets @ torch.arange(8.0), atol=1e-5)
    assert images.flatten(1).std(1).max() == 0, "the same share at every pixel"
    share = targets[torch.arange(COUNT), torch.arange(COUNT) % 8]
    different = share < 1 - 1e-6
    assert 0.8 < float(different.float().mean()) < 0.9, "a partner is the sample itself in an eighth of all"
    alone = share[different]
    assert abs(float(alone.mean()) - 0.5) < 0.03
    assert abs(float(alone.var()) - 0.25 / (2 * 0.4 + 1)) < 0.01, "the variance of Beta(0.4, 0.4)"


def test_cutmix_takes_as_much_of_the_target_as_there_are_pixels() -> None:
    images, targets = mix_pairs(None, 1.0)
    pixels = torch.stack([(images == number).flatten(1).float().mean(1) for number in range(8)], 1)
    assert torch.allclose(targets, pixels, atol=1e-6)
    assert float((targets.amax(1) < 1).float().mean()) > 0.3
    one = images[(targets.amax(1) > 0.5) & (targets.amax(1) < 0.9)][0, 0]
    other = one != one.mode().values.mode().values
    rows, columns = other.any(1), other.any(0)
    assert other.sum() == rows.sum() * columns.sum(), "a box"


def test_with_both_each_sample_meets_one_of_them() -> None:
    images, targets = mix_pairs(1.0, 1.0)
    changed = targets.amax(1) < 1 - 1e-6
    plain = images.flatten(1).std(1) == 0
    assert 0.4 < float(plain[changed].float().mean()) < 0.7


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, None), (None, 1.0), (0.2, 1.0)])
def test_each_micro_batch_is_mixed_within_itself(mixup: float | None, cutmix: float | None) -> None:
    """Joined with others or alone, the same bits; and the last one may be short."""
    inputs, labels = torch.randn(20, 3, 6, 6), torch.arange(20) % 5
    mixer = SampleMixer(mixup, cutmix, 5)
    whole = mixer(inputs, labels, draws(20), 8)
    for first, last in ((0, 8), (8, 16), (16, 20)):
        part = KeyedRandom(1, 0, torch.arange(first, last))
        alone = mixer(inputs[first:last], labels[first:last], part, 8)
        assert torch.equal(whole[0][first:last], alone[0])
        assert torch.equal(whole[1][first:last], alone[1])
    other = mixer(inputs, labels, draws(20, epoch=1), 8)
    assert not torch.equal(whole[0], other[0])


def test_vectors_can_be_mixed_but_not_cut() -> None:
    vectors, labels = torch.randn(8, 5), torch.arange(8) % 2
    assert SampleMixer(0.2, None, 2)(vectors, labels, draws(8), 8)[0].shape == (8, 5)
    with pytest.raises(RequestError, match=r"inputs are float32 \(8, 5\), and can't be mixed"):
        SampleMixer(None, 1.0, 2)(vectors, labels, draws(8), 8)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        ({"ids": torch.ones(2, 3)}, torch.ones(2).long(), r"inputs are \{ids: float32 \(2, 3\)\}"),
        (torch.ones(2, 3).long(), torch.ones(2).long(), r"inputs are int64 \(2, 3\)"),
        (torch.ones(2, 3), torch.ones(2), r"targets are float32 \(2,\)"),
        (torch.ones(2, 3), torch.ones(2, 3).long(), r"targets are int64 \(2, 3\)"),
    ],
)
def test_what_can_not_be_mixed_is_named(inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SampleMixer(0.2, None, 2).check(inputs, targets)


def test_there_must_be_classes() -> None:
    with pytest.raises(RequestError, match="the data has none"):
        SampleMixer(0.2, None, 0)
