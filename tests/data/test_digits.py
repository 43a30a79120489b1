import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from multigpu_cli.data.builtin.small_images import digits as load
from multigpu_cli.data.order import KeyedRandom


def test_the_1797_digits_are_split_by_seed_and_stay_bytes():
    source: Any = load(seed=1)
    parts = [source.train, source.val, source.test]
    assert [len(part) for part in parts] == [1258, 180, 359]
    assert all(part.tensors[0].dtype == torch.uint8 and part.tensors[0].is_contiguous() for part in parts)
    assert source.train.tensors[0].shape[1:] == source.input_shape == (1, 8, 8)
    assert set(source.train.tensors[1].tolist()) == set(range(10))
    again: list[Any] = [load(seed=1), load(seed=2)]
    assert [torch.equal(each.test.tensors[0], source.test.tensors[0]) for each in again] == [True, False]


def test_the_rows_are_those_of_scikit_learn_which_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, labels = load_digits(return_X_y=True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sklearn", None)  # whose import takes seconds on each rank
        source: Any = load(seed=1)
    tensors = [part.tensors for part in (source.train, source.val, source.test)]
    rows = [
        [*image.flatten().tolist(), int(label)]
        for images, labels in tensors
        for image, label in zip(images, labels, strict=True)
    ]
    assert sorted(rows) == sorted(np.column_stack([pixels, labels]).astype(int).tolist())


def test_the_model_meets_numbers_from_minus_1_to_1():
    source: Any = load(seed=1)
    met = source.prepare(source.train.tensors[0])
    assert met.dtype == torch.float32
    assert (met.min(), met.max()) == (-1, 1)


def test_augmentation_shifts_and_can_be_left_out():
    source: Any = load(seed=1)
    images = source.train.tensors[0][:100]
    moved = source.augment(images, KeyedRandom(1, 0, torch.arange(100)))
    unmoved = (moved == images).flatten(1).all(1).sum()
    assert 2 < unmoved < 30  # one of nine shifts is none
    assert load(seed=1, augment=False).augment is None
