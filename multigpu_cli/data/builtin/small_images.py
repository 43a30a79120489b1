"""Datasets of small images: scikit-learn's digits, MNIST and Fashion-MNIST in IDX files, CIFAR-10's binary version.

Sources: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998;
Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998 (the format is described on the MNIST
page); H. Xiao et al., "Fashion-MNIST: a Novel Image Dataset for Benchmarking", arXiv:1708.07747; A. Krizhevsky,
"Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import gzip
import struct
import zlib
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.data.files import DatasetFiles
from multigpu_cli.data.order import split_by_sample
from multigpu_cli.data.source import DataSource
from multigpu_cli.data.transforms import fit_standardised, model_input_shape, shift, shift_and_mirror

Pair = tuple[Tensor, Tensor]  # images (n, C, H, W) uint8 and labels (n,) int64
_DIGITS = tuple("0123456789")  # the names of ten classes


def digits(seed: int, augment: bool = True, val_fraction: float = 0.1, test_fraction: float = 0.2) -> DataSource:
    """1,797 scanned digits of 8×8 pixels in 17 grey levels, split by seed; augmentation shifts by up to one pixel."""
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")  # an import takes seconds
    rows = torch.from_numpy(np.loadtxt(str(file), np.uint8, delimiter=","))
    images, targets = rows[:, :64].view(-1, 1, 8, 8), rows[:, 64].long()
    parts = split_by_sample(len(images), (val_fraction, test_fraction), seed)
    train, val, test = (TensorDataset(images[part], targets[part]) for part in parts)
    return DataSource(
        train=train,
        val=val,
        test=test,
        input_shape=(1, 8, 8),
        num_classes=10,
        class_names=_DIGITS,
        prepare=lambda images: images.float() / 8 - 1,  # 0…16 to -1…1
        augment=partial(shift, reach=1) if augment else None,
        model="convnet",
    )


_UNSIGNED_BYTES = 0x08  # the IDX format's code for the type of its numbers
_LAYOUT = """\
    train-images-idx3-ubyte[.gz]  train-labels-idx1-ubyte[.gz]
    t10k-images-idx3-ubyte[.gz]   t10k-labels-idx1-ubyte[.gz]"""

_MNIST = DatasetFiles(
    name="mnist",
    address="https://ossci-datasets.s3.amazonaws.com/mnist/ (the four .gz files)",
    folders=(".", "raw", "MNIST/raw", "mnist"),
    layout=_LAYOUT,
)
_FASHION_MNIST = DatasetFiles(
    name="fashion-mnist",
    address="https://github.com/zalandoresearch/fashion-mnist (data/fashion)",
    folders=(".", "raw", "FashionMNIST/raw", "fashion-mnist"),
    layout=_LAYOUT,
)
_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def mnist(data_dir: str | None, mode: str, seed: int, augment: bool = True, val_fraction: float = 0.1) -> DataSource:
    """60,000 + 10,000 handwritten digits of 28×28; augmentation shifts each training image by up to two pixels.

    `data_dir` is the folder of the four files, or the root folder of torchvision's dataset. `val_fraction` of the
    60,000 training images, chosen by seed, are for validation.
    """
    train, test = _read_parts(_MNIST, data_dir)
    facts = {"class_names": _DIGITS, "augment": partial(shift, reach=2) if augment else None}
    return _hold_out(train, test, mode, seed, val_fraction, model="convnet", **facts)


def fashion_mnist(
    data_dir: str | None, mode: str, seed: int, augment: bool = True, val_fraction: float = 0.1
) -> DataSource:
    """Ten kinds of clothing; augmentation shifts by up to two pixels and mirrors half of the images. See `mnist`."""
    train, test = _read_parts(_FASHION_MNIST, data_dir)
    facts = {"class_names": _CLOTHES, "augment": partial(shift_and_mirror, reach=2) if augment else None}
    return _hold_out(train, test, mode, seed, val_fraction, model="convnet", **facts)


def _read_parts(download: DatasetFiles, data_dir: str | None) -> tuple[Pair, Pair]:
    """The training samples and the test samples of the four IDX files."""
    folder = download.folder(data_dir, _spellings("train-images-idx3-ubyte"))
    return _read_idx(download, folder, "train"), _read_idx(download, folder, "t10k")


def _hold_out(train: Pair, test: Pair, mode: str, seed: int, val_fraction: float, **facts: Any) -> DataSource:
    """Set aside a share of the training samples for validation, and standardise by the others."""
    images, labels = train
    rest, val = split_by_sample(len(images), (val_fraction,), seed)
    return DataSource(
        train=TensorDataset(images[rest], labels[rest]),
        val=TensorDataset(images[val], labels[val]),
        test=TensorDataset(*test),
        input_shape=model_input_shape(images.shape[1:], mode),
        num_classes=len(facts["class_names"]),
        prepare=fit_standardised(images[rest], mode),
        **facts,
    )


def _read_idx(download: DatasetFiles, folder: Path, part: str) -> Pair:
    """Images (n, 1, 28, 28) uint8 and labels (n,) int64 of 'train' or 't10k'."""
    image_file, label_file = (
        next(filter(Path.exists, [folder / each for each in _spellings(name)]), folder / name)
        for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    )
    images, labels = _array(download, image_file, 3), _array(download, label_file, 1)
    if images.shape[1:] != (28, 28):
        raise download.damaged_error(image_file, f"has images of {images.shape[1]}×{images.shape[2]}, expected 28×28")
    if len(images) != len(labels):
        raise download.damaged_error(
            label_file, f"has {len(labels)} labels where {image_file.name} has {len(images)} images"
        )
    targets = download.check_labels(label_file, labels, 0, len(_DIGITS) - 1)  # as many kinds of clothing
    return torch.from_numpy(images)[:, None], torch.from_numpy(targets)


def _spellings(name: str) -> list[str]:
    """The names under which the file is distributed: unpacked or gzipped, with - or . before idx."""
    return [name, f"{name}.gz", name.replace("-idx", ".idx"), name.replace("-idx", ".idx") + ".gz"]


def _array(download: DatasetFiles, file: Path, dimensions: int) -> np.ndarray:
    """The array in an IDX file of bytes: 0, 0, type, number of dimensions, sizes (big-endian), then the numbers."""
    content = _plain(download, file)
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes([0, 0, _UNSIGNED_BYTES, dimensions]):
        raise download.damaged_error(file, f"does not begin like an IDX file of {dimensions}-dimensional bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    expected = header + int(np.prod(shape, dtype=object))  # Python integers can't overflow, even with a damaged header
    if len(content) != expected or 0 in shape:
        raise download.damaged_error(file, f"has {len(content):,} bytes; its header, {shape}, means {expected:,}")
    return np.frombuffer(bytearray(content), np.uint8, offset=header).reshape(shape)


def _plain(download: DatasetFiles, file: Path) -> bytes:
    content = download.content(file)
    if content[:2] != b"\x1f\x8b":  # gzip's magic number; some browsers unpack a file but keep its name
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as broken:
        raise download.damaged_error(file, f"is damaged or cut short ({broken})") from broken


_RECORD = 1 + 3 * 32 * 32  # bytes
_TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_CIFAR10 = DatasetFiles(
    name="cifar10",
    address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    folders=(".", "cifar-10-batches-bin"),
    layout="    cifar-10-batches-bin/  data_batch_1.bin … data_batch_5.bin  test_batch.bin",
)


def cifar10(data_dir: str | None, mode: str, seed: int, augment: bool = True, val_fraction: float = 0.1) -> DataSource:
    """50,000 + 10,000 color images of 32×32; augmentation crops each, padded by four pixels, and mirrors half of them.

    `data_dir` is the folder cifar-10-batches-bin, or its parent. `val_fraction` of the 50,000 training images, chosen
    by seed, are for validation.
    """
    folder = _CIFAR10.folder(data_dir, _TRAIN_FILES[:1])
    parts = [_records(folder / name) for name in (*_TRAIN_FILES, "test_batch.bin")]
    for name, (images, _) in zip((*_TRAIN_FILES, "test_batch.bin"), parts, strict=True):
        if len(images) != len(parts[0][0]):
            fault = f"has {len(images):,} images where {_TRAIN_FILES[0]} has {len(parts[0][0]):,}"
            raise _CIFAR10.damaged_error(folder / name, fault)
    images, labels = (torch.cat(tensors) for tensors in zip(*parts[:-1], strict=True))
    facts = {"class_names": _CLASSES, "augment": partial(shift_and_mirror, reach=4) if augment else None}
    return _hold_out((images, labels), parts[-1], mode, seed, val_fraction, model="resnet18", **facts)


def _records(file: Path) -> Pair:
    """Images (n, 3, 32, 32) uint8 and labels (n,) int64 of one file.

    A record is one label byte, then 1,024 bytes each of red, green and blue. The Python version is not read: unpickling
    runs code.
    """
    content = np.frombuffer(_CIFAR10.content(file), np.uint8)
    if not len(content) or len(content) % _RECORD:
        raise _CIFAR10.damaged_error(file, f"has {len(content):,} bytes, not a whole number of records of {_RECORD:,}")
    records = content.reshape(-1, _RECORD)
    labels = _CIFAR10.check_labels(file, records[:, 0], 0, len(_CLASSES) - 1)
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(images), torch.from_numpy(labels)
