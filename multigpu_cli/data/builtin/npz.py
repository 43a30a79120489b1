"""Arrays in an .npz file: X_train and y_train, or X and y; also X_val, y_val, X_test, y_test."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.config.regular_files import open_regular
from multigpu_cli.data.files import explain_unreadable, locate_other_file, locate_single_file
from multigpu_cli.data.order import split_by_sample
from multigpu_cli.data.source import FEW, SPLITS, DataSource, Kind, check_precision
from multigpu_cli.errors import RequestError

_LAYOUT = "np.savez('data.npz', X_train=…, y_train=…, X_test=…, y_test=…), or X=… and y=…"


def load(
    data_dir: str | None, seed: int, file: str | None = None, new: str | None = None, kind: Kind = "auto"
) -> DataSource:
    """The arrays as they are, float64 as float32; nothing is scaled but bytes, to 0…1.

    X and y alone are divided by seed, 80/10/10; without X_val, 10 % of the training samples are set aside. Whole
    numbers y (n,) are classes, other numbers ask for regression, 0 and 1 in (n, k) are several labels, and whole
    numbers in the shape of X are the tokens that follow.

    Args:
        file: name of the file, if the folder holds several.
        new: another file, with X alone, for predictions.
        kind: classification, regression, or auto: whole numbers that may be amounts, such as prices, are refused.
    """
    path = locate_single_file("npz", data_dir, file, _LAYOUT)
    arrays = _arrays(path)
    if kind == "regression":  # as float64 they are checked for rounding by float32
        whole_numbers = [name for name in arrays if name.startswith("y") and arrays[name].dtype.kind in "iub"]
        arrays |= {name: arrays[name].astype(np.float64) for name in whole_numbers}
    splits: dict[str, Any] = {name: _split(arrays, f"_{name}", path) for name in SPLITS if f"X_{name}" in arrays}
    whole = splits.get("train") or _split(arrays, "", path)
    fractions = (0.1, 0.1) if "train" not in splits else () if "val" in splits else (0.1,)
    if fractions:
        indices = split_by_sample(len(whole), fractions, seed)
        parts = [TensorDataset(*(tensor[part] for tensor in whole.tensors)) for part in indices]
        splits |= dict(zip(SPLITS, parts, strict=False))
    inputs, targets = whole.tensors
    task, classes = _kind(inputs, targets, list(splits.values()), kind, path)
    if new and task == "language-model":
        raise RequestError("data.args.new: not supported for tokens", remedy="multigpu sample writes text")
    return DataSource(
        **splits,
        new=_unknown(locate_other_file("npz", Path(data_dir or "."), new), whole) if new else None,
        input_shape=tuple(inputs.shape[1:]),
        num_classes=classes,
        num_outputs=int(targets.shape[1:].numel()),
        model="gpt" if task == "language-model" else "mlp",
        task=task,
    )


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        # NumPy leaves a damaged file open, so it is opened here; members other than arrays come as bytes
        with open_regular(path.resolve()) as raw, np.load(raw, allow_pickle=False) as file:
            return {name: np.asarray(file[name]) for name in file.files}
    except Exception as error:  # zipfile, its decompressors and NumPy raise a dozen types for damaged and hostile files
        problem = str(error) or type(error).__name__
        remedy = f"plain arrays of numbers: {_LAYOUT}"
        raise explain_unreadable(f"--data npz: {path}: {problem}", error, remedy) from error


def _split(arrays: dict[str, np.ndarray], ending: str, path: Path) -> TensorDataset:
    tensors = [_tensor(arrays, f"{name}{ending}", path) for name in "Xy"]
    if len(tensors[0]) != len(tensors[1]) or not len(tensors[0]):
        raise RequestError(
            f"--data npz: X{ending} has {len(tensors[0])} samples in {path}, y{ending} {len(tensors[1])}"
        )
    inputs, targets = tensors
    return TensorDataset(inputs, targets if targets.is_floating_point() else targets.long())


def _unknown(path: Path, known: TensorDataset) -> TensorDataset:
    """The samples of a file that has no targets."""
    arrays = _arrays(path)
    inputs, like = _tensor(arrays, "X", path), known.tensors[1]
    if inputs.shape[1:] != known.tensors[0].shape[1:]:
        shapes = tuple(inputs.shape[1:]), tuple(known.tensors[0].shape[1:])
        raise RequestError(f"--data npz: samples in {path} are {shapes[0]}, the others {shapes[1]}")
    return TensorDataset(inputs, like.new_zeros(len(inputs), *like.shape[1:]))


def _tensor(arrays: dict[str, np.ndarray], name: str, path: Path) -> Tensor:
    if name not in arrays:
        raise RequestError(f"--data npz: {path} holds no {name} ({', '.join(arrays)})", remedy=_LAYOUT)
    if arrays[name].dtype.kind not in "fiub" or not arrays[name].ndim:
        raise RequestError(f"--data npz: {name} in {path} is {arrays[name].dtype} {arrays[name].shape}, no numbers")
    if arrays[name].dtype == np.float64:
        check_precision(arrays[name], f"--data npz: {name} in {path}")
    tensor = torch.from_numpy(np.ascontiguousarray(arrays[name]))
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _kind(inputs: Tensor, targets: Tensor, splits: list[TensorDataset], kind: str, path: Path) -> tuple[str, int]:
    """The task that the targets are made for, and the number of classes or tokens; RequestError: see data.kind."""
    if kind == "classification" and (targets.is_floating_point() or targets.ndim != 1):
        raise RequestError(f"data.kind: y in {path} is no array of whole numbers (n,)", remedy="data.kind=regression")
    is_multi_label = targets.ndim == 2 and bool(((targets == 0) | (targets == 1)).all())
    if kind == "regression" or (targets.is_floating_point() and not is_multi_label):
        return "regression", 0
    most = max(int(split.tensors[1].max()) for split in splits) + 1
    if targets.ndim == 1:
        if kind == "auto":
            _check_class_numbers(torch.cat([split.tensors[1] for split in splits]), path)
        return "classification", most
    if targets.shape == inputs.shape and not inputs.is_floating_point():
        return "language-model", max(most, *(int(split.tensors[0].max()) + 1 for split in splits))
    return "multi-label", targets.shape[1]


def _check_class_numbers(targets: Tensor, path: Path) -> None:
    """Raise RequestError if whole numbers (n,) may be amounts or seconds.

    They number classes if they are FEW, or nearly all from 0 on with 5 samples each; some classes may be absent.
    """
    values = targets.unique()
    count, most = len(values), int(values[-1])
    are_numbered = count >= 0.9 * (most + 1) and len(targets) >= 5 * count
    if not are_numbered and (count > FEW or most >= max(FEW, len(targets))):
        numbers = f"{count:,} different whole numbers from {int(values[0]):,} to {most:,}"
        remedy = "--set data.kind=regression, or --set data.kind=classification if they number classes from 0 on"
        raise RequestError(f"--data npz: {path}: y has {numbers}, which may be classes or amounts", remedy=remedy)
