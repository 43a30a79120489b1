"""UCI HAR: six activities from the accelerometer and gyroscope of a smartphone at the waist, 50 Hz.

Source: D. Anguita et al., "A Public Domain Dataset for Human Activity Recognition Using Smartphones", ESANN 2013.
Windows of 128 samples overlap by half, so the validation split consists of whole subjects: a random one would leak.
"""

from functools import partial
from io import BytesIO
from math import pi
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.data.files import DatasetFiles
from multigpu_cli.data.order import SPLIT, KeyedRandom, shuffle_numbers
from multigpu_cli.data.source import DataSource
from multigpu_cli.data.transforms import fit_standardised, model_input_shape
from multigpu_cli.errors import RequestError

SIGNALS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
WINDOW = 128

_ROTATION, _SCALE = 0, 1  # one stream of random numbers each

_DOWNLOAD = DatasetFiles(
    name="har",
    address="https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones",
    folders=(".", "UCI HAR Dataset"),
    layout="""\
    UCI HAR Dataset/
      activity_labels.txt
      train/  y_train.txt  subject_train.txt  Inertial Signals/body_acc_x_train.txt … total_acc_z_train.txt
      test/   y_test.txt   subject_test.txt   Inertial Signals/body_acc_x_test.txt … total_acc_z_test.txt""",
)


def load(
    data_dir: str | None, mode: str, seed: int, val_subjects: int = 3, rotation: float = 15.0, scaling: float = 0.2
) -> DataSource:
    """Read the original folder; samples are (9, 128), channels in the order of SIGNALS.

    Args:
        data_dir: the folder 'UCI HAR Dataset', or its parent.
        val_subjects: number of the 21 training subjects used for validation, chosen by seed.
        rotation: augmentation rotates the phone by up to this many degrees about each axis (0: off).
        scaling: augmentation scales all signals by up to this share (0: off).

    Raises:
        RequestError: the dataset or a file of it is missing or damaged.
    """
    shape = model_input_shape((len(SIGNALS), WINDOW), mode)
    folder = _DOWNLOAD.folder(data_dir, ["activity_labels.txt", "train"])
    names = _class_names(folder / "activity_labels.txt")
    signals, labels, subjects = _part(folder, "train", len(names))
    train, val = split_by_group(subjects, val_subjects, seed)
    test_signals, test_labels, _ = _part(folder, "test", len(names))
    return DataSource(
        train=TensorDataset(signals[train], labels[train]),
        val=TensorDataset(signals[val], labels[val]),
        test=TensorDataset(test_signals, test_labels),
        input_shape=shape,
        num_classes=len(names),
        class_names=names,
        prepare=fit_standardised(signals[train], mode),
        augment=partial(_rotate_and_scale, rotation=rotation, scaling=scaling) if rotation or scaling else None,
        model="har-convnet",
    )


def _rotate_and_scale(signals: Tensor, draws: KeyedRandom, rotation: float, scaling: float) -> Tensor:
    """Rotate the axes of all three sensors by the same angles and scale all signals by the same factor; (n, 9, T)."""
    angles = (2 * draws.uniform(_ROTATION, 3) - 1) * (rotation * pi / 180)
    factor = 1 + (2 * draws.uniform(_SCALE) - 1) * scaling
    axes = list(signals.view(len(signals), 3, 3, -1).unbind(2))  # x, y, z: each (n, sensor, T)
    for turned, angle in enumerate(angles.unbind(1)):
        cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
        a, b = (turned + 1) % 3, (turned + 2) % 3
        axes[a], axes[b] = cos * axes[a] - sin * axes[b], sin * axes[a] + cos * axes[b]
    return torch.stack(axes, dim=2).view_as(signals) * factor[:, :, None]


def _class_names(file: Path) -> tuple[str, ...]:
    """Names of activities 1, 2, … from lines such as '1 WALKING'."""
    lines = [line.split() for line in _DOWNLOAD.content(file).decode("utf-8", "replace").splitlines() if line.strip()]
    if not lines or [line[0] for line in lines] != [str(number + 1) for number in range(len(lines))]:
        raise _DOWNLOAD.damaged_error(file, "expected lines such as '1 WALKING', numbered from 1")
    return tuple(" ".join(line[1:]) or line[0] for line in lines)


def _part(folder: Path, part: str, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Signals (n, 9, 128) float32, labels (n,) from 0 and subjects (n,) of 'train' or 'test'."""
    label_file = folder / part / f"y_{part}.txt"
    labels = _DOWNLOAD.check_labels(label_file, _whole_numbers(label_file), 1, classes)
    subject_file = folder / part / f"subject_{part}.txt"
    subjects = _whole_numbers(subject_file)
    if len(subjects) != len(labels):
        raise _DOWNLOAD.damaged_error(
            subject_file, f"has {len(subjects)} lines where {label_file.name} has {len(labels)}"
        )
    signals = np.empty((len(labels), len(SIGNALS), WINDOW), np.float32)
    for channel, signal in enumerate(SIGNALS):
        file = folder / part / "Inertial Signals" / f"{signal}_{part}.txt"
        signals[:, channel] = _windows(file, len(labels))
    return torch.from_numpy(signals), torch.from_numpy(labels), torch.from_numpy(subjects)


def _windows(file: Path, expected: int) -> np.ndarray:
    windows = _numbers(file)
    if windows.shape != (expected, WINDOW):
        rows, columns = windows.shape
        raise _DOWNLOAD.damaged_error(file, f"has {rows} lines of {columns} numbers, expected {expected} of {WINDOW}")
    if not np.isfinite(windows).all():
        raise _DOWNLOAD.damaged_error(
            file, f"line {int(np.argwhere(~np.isfinite(windows))[0, 0]) + 1} holds NaN or infinity"
        )
    return windows


def _whole_numbers(file: Path) -> np.ndarray:
    """(n,) int64 from a file of one whole number a line."""
    numbers = _numbers(file)
    if numbers.shape[1] != 1 or not (np.isfinite(numbers) & (numbers == np.round(numbers))).all():
        raise _DOWNLOAD.damaged_error(file, "expected one whole number a line")
    return numbers[:, 0].astype(np.int64)


def _numbers(file: Path) -> np.ndarray:
    """(lines, numbers a line) float32 from text; an empty file is damaged too."""
    text = _DOWNLOAD.content(file)
    if not text.strip():
        raise _DOWNLOAD.damaged_error(file, "is empty")
    try:
        return np.loadtxt(BytesIO(text), dtype=np.float32, ndmin=2, comments=None, encoding="latin-1")
    except ValueError as malformed:
        raise _DOWNLOAD.damaged_error(file, str(malformed)) from malformed


def split_by_group(groups: Tensor, val_groups: int, seed: int) -> tuple[Tensor, Tensor]:
    """(training, validation) sample indices, drawn by seed; no group (n,), a subject or recording, is in both."""
    names = groups.unique()
    if not 0 < val_groups < len(names):
        problem = f"--data: {val_groups} of {len(names)} groups can't be used for validation"
        raise RequestError(problem, remedy=f"use at least 1 and at most {len(names) - 1}")
    chosen = names[shuffle_numbers(len(names), seed, SPLIT)[:val_groups]]
    held_out = torch.isin(groups, chosen)
    return torch.nonzero(~held_out).flatten(), torch.nonzero(held_out).flatten()
