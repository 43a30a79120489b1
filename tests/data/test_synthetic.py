from typing import Any

import pytest
import torch

from multigpu_cli.data.builtin.synthetic import load
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.factories import call_factory

SMALL = {"train": 500, "val": 100, "test": 300}


def nearest_class_accuracy(difficulty):
    source: Any = load("flatten", 1, shape=[1, 8, 8], classes=5, difficulty=difficulty, **SMALL)
    images, labels = source.train.tensors
    met = source.prepare(images).flatten(1)
    centres = torch.stack([met[labels == label].mean(0) for label in range(5)])
    test_images, test_labels = source.test.tensors
    guesses = torch.cdist(source.prepare(test_images).flatten(1), centres).argmin(1)
    return (guesses == test_labels).float().mean()


@pytest.mark.parametrize("shape", [(20,), (2, 9), (3, 6, 5), (1, 2, 3, 4)])
def test_any_shape_and_class_count(shape):
    source: Any = load("flatten", 1, shape=shape, classes=3, **SMALL)
    assert source.train.tensors[0].shape == (500, *shape)
    assert source.input_shape == shape
    assert source.train.tensors[0].dtype == torch.uint8
    assert source.train.tensors[1].bincount().tolist() == [167, 167, 166]
    assert source.prepare(source.val.tensors[0]).shape == (100, *shape)


def test_the_seed_decides_every_sample_and_the_parts_differ():
    sources: list[Any] = [load("flatten", seed, shape=[3, 8, 8], **SMALL) for seed in (1, 1, 2)]
    first, same, other = sources
    assert torch.equal(first.train.tensors[0], same.train.tensors[0])
    assert torch.equal(first.test.tensors[1], same.test.tensors[1])
    assert not torch.equal(first.train.tensors[0], other.train.tensors[0])
    assert not torch.equal(first.train.tensors[0][:100], first.val.tensors[0])


def test_classes_can_be_learned_and_difficulty_counts():
    easy, usual, hard = (nearest_class_accuracy(difficulty) for difficulty in (0.0, 1.0, 3.0))
    assert easy == 1
    assert usual > 0.9
    assert 0.2 < hard < usual


def test_parts_can_be_left_out_and_modes_join_channels():
    source: Any = load("average", 1, shape=[3, 8, 8], train=50, val=0, test=0)
    assert source.val is None
    assert source.test is None
    assert source.input_shape == (1, 8, 8)
    assert source.prepare(source.train.tensors[0]).shape == (50, 1, 8, 8)


@pytest.mark.parametrize(
    "wrong",
    [{"shape": []}, {"shape": [3, 0]}, {"shape": [2.5]}, {"classes": 1}, {"train": 3}, {"val": -1}, {"difficulty": -1}],
)
def test_sizes_that_make_no_dataset_are_refused_by_name(wrong):
    with pytest.raises(RequestError, match=f"data.args.{next(iter(wrong))}"):
        call_factory(load, {"mode": "flatten", "seed": 1}, wrong, where="data")
