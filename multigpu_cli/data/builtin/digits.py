"""scikit-learn's digits: 1,797 scanned handwritten digits of 8×8 pixels in 17 grey levels, shipped with the package.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.data.order import split_by_sample
from multigpu_cli.data.pixels import shift
from multigpu_cli.data.source import DataSource


def load(seed: int, augment: bool = True, val_fraction: float = 0.1, test_fraction: float = 0.2) -> DataSource:
    """Split by seed into training, validation and test parts.

    Args:
        augment: shift each training image by up to one pixel.
        val_fraction, test_fraction: shares of the 1,797 images.
    """
    from sklearn.datasets import load_digits  # late: half a second, and only this dataset needs it

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).to(torch.uint8).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels).long()
    parts = split_by_sample(len(images), (val_fraction, test_fraction), seed)
    train, val, test = (TensorDataset(images[part], targets[part]) for part in parts)
    return DataSource(
        train=train,
        val=val,
        test=test,
        input_shape=(1, 8, 8),
        num_classes=10,
        class_names=tuple("0123456789"),
        prepare=_normalise,
        augment=partial(shift, reach=1) if augment else None,
        model="convnet",
    )


def _normalise(images: Tensor) -> Tensor:
    return images.float() / 8 - 1  # 0…16 to -1…1
