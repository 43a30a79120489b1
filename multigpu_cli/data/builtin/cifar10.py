"""CIFAR-10, binary version: 50,000 + 10,000 color images of 32×32 in ten classes.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. A record is one label byte, then
1,024 bytes each of red, green and blue. The Python version is not read: unpickling runs code.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.data.files import DatasetFiles
from multigpu_cli.data.order import split_by_sample
from multigpu_cli.data.pixels import fit_standardised, model_input_shape, shift_and_mirror
from multigpu_cli.data.source import DataSource

_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32  # bytes
_TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_DOWNLOAD = DatasetFiles(
    name="cifar10",
    address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    folders=(".", "cifar-10-batches-bin"),
    layout="    cifar-10-batches-bin/  data_batch_1.bin … data_batch_5.bin  test_batch.bin",
)


def load(data_dir: str | None, mode: str, seed: int, augment: bool = True, val_fraction: float = 0.1) -> DataSource:
    """Read the six files; augmentation is a crop of the image padded by four pixels, mirrored half of the time.

    Args:
        data_dir: the folder cifar-10-batches-bin, or its parent.
        val_fraction: share of the 50,000 training images used for validation, chosen by seed.

    Raises:
        RequestError: the dataset or a file of it is missing or damaged.
    """
    folder = _DOWNLOAD.folder(data_dir, _TRAIN_FILES[:1])
    parts = [_records(folder / name) for name in (*_TRAIN_FILES, "test_batch.bin")]
    for name, (labels, _) in zip((*_TRAIN_FILES, "test_batch.bin"), parts, strict=True):
        if len(labels) != len(parts[0][0]):
            fault = f"has {len(labels):,} images where {_TRAIN_FILES[0]} has {len(parts[0][0]):,}"
            raise _DOWNLOAD.damaged_error(folder / name, fault)
    targets, images = (torch.cat(tensors) for tensors in zip(*parts[:-1], strict=True))
    train, val = split_by_sample(len(images), (val_fraction,), seed)
    return DataSource(
        train=TensorDataset(images[train], targets[train]),
        val=TensorDataset(images[val], targets[val]),
        test=TensorDataset(parts[-1][1], parts[-1][0]),
        input_shape=model_input_shape(_SHAPE, mode),
        num_classes=len(_CLASSES),
        class_names=_CLASSES,
        prepare=fit_standardised(images[train], mode),
        augment=partial(shift_and_mirror, reach=4) if augment else None,
        model="resnet18",
    )


def _records(file: Path) -> tuple[Tensor, Tensor]:
    """Labels (n,) int64 and images (n, 3, 32, 32) uint8 of one file."""
    content = np.frombuffer(_DOWNLOAD.content(file), np.uint8)
    if not len(content) or len(content) % _RECORD:
        raise _DOWNLOAD.damaged_error(file, f"has {len(content):,} bytes, not a whole number of records of {_RECORD:,}")
    records = content.reshape(-1, _RECORD)
    labels = _DOWNLOAD.check_labels(file, records[:, 0], 0, len(_CLASSES) - 1)
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, *_SHAPE)
    return torch.from_numpy(labels), torch.from_numpy(images)
