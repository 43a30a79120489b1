"""MNIST and Fashion-MNIST: 60,000 + 10,000 grayscale images of 28×28 in IDX files, gzipped or not.

Sources: Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998 (the format is described on
the MNIST page); H. Xiao et al., "Fashion-MNIST: a Novel Image Dataset for Benchmarking", arXiv:1708.07747.
"""

import gzip
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.data.files import DatasetFiles
from multigpu_cli.data.order import split_by_sample
from multigpu_cli.data.pixels import fit_standardised, model_input_shape, shift, shift_and_mirror
from multigpu_cli.data.source import DataSource

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
    """Handwritten digits; augmentation shifts each training image by up to two pixels.

    Args:
        data_dir: the folder of the four files, or the root folder of torchvision's dataset.
        val_fraction: share of the 60,000 training images used for validation, chosen by seed.

    Raises:
        RequestError: the dataset or a file of it is missing or damaged.
    """
    augmentation = partial(shift, reach=2) if augment else None
    return _source(_MNIST, data_dir, mode, seed, val_fraction, tuple("0123456789"), augmentation)


def fashion_mnist(
    data_dir: str | None, mode: str, seed: int, augment: bool = True, val_fraction: float = 0.1
) -> DataSource:
    """Ten kinds of clothing; augmentation shifts by up to two pixels and mirrors half of the images. See `mnist`."""
    augmentation = partial(shift_and_mirror, reach=2) if augment else None
    return _source(_FASHION_MNIST, data_dir, mode, seed, val_fraction, _CLOTHES, augmentation)


def _source(
    download: DatasetFiles,
    data_dir: str | None,
    mode: str,
    seed: int,
    val_fraction: float,
    names: tuple[str, ...],
    augment: partial[Tensor] | None,
) -> DataSource:
    folder = download.folder(data_dir, _spellings("train-images-idx3-ubyte"))
    images, labels = _part(download, folder, "train", len(names))
    test_images, test_labels = _part(download, folder, "t10k", len(names))
    train, val = split_by_sample(len(images), (val_fraction,), seed)
    return DataSource(
        train=TensorDataset(images[train], labels[train]),
        val=TensorDataset(images[val], labels[val]),
        test=TensorDataset(test_images, test_labels),
        input_shape=model_input_shape(images.shape[1:], mode),
        num_classes=len(names),
        class_names=names,
        prepare=fit_standardised(images[train], mode),
        augment=augment,
        model="convnet",
    )


def _part(download: DatasetFiles, folder: Path, part: str, classes: int) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 28, 28) uint8 and labels (n,) int64 of 'train' or 't10k'."""
    image_file, label_file = (
        _existing(folder, f"{part}-{content}-ubyte") for content in ("images-idx3", "labels-idx1")
    )
    images, labels = _array(download, image_file, 3), _array(download, label_file, 1)
    if images.shape[1:] != (28, 28):
        raise download.damaged_error(image_file, f"has images of {images.shape[1]}×{images.shape[2]}, expected 28×28")
    if len(images) != len(labels):
        raise download.damaged_error(
            label_file, f"has {len(labels)} labels where {image_file.name} has {len(images)} images"
        )
    targets = download.check_labels(label_file, labels, 0, classes - 1)
    return torch.from_numpy(images)[:, None], torch.from_numpy(targets)


def _spellings(name: str) -> list[str]:
    """The names under which the file is distributed: unpacked or gzipped, with - or . before idx."""
    return [name, f"{name}.gz", name.replace("-idx", ".idx"), name.replace("-idx", ".idx") + ".gz"]


def _existing(folder: Path, name: str) -> Path:
    found = (folder / spelling for spelling in _spellings(name) if (folder / spelling).exists())
    return next(found, folder / name)


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
