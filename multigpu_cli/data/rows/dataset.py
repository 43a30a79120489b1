"""Rows of a store as samples: numbers by whole batches, tokens, and encoded images one by one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.data.notation import Notation
from multigpu_cli.data.order import RowSelection
from multigpu_cli.data.rows.store import RowStore
from multigpu_cli.data.transforms import cut_square, decode_image
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.model_call import IGNORED


@dataclass(frozen=True, kw_only=True)
class RowRoles:
    """What the columns of a store are for: those that the model sees, and the one that it predicts."""

    inputs: tuple[str, ...]
    target: str
    stacked: bool = False  # inputs are single numbers, side by side in a vector
    labels: Mapping[Any, int] | None = None  # class number of each target value; None: values are used as they are
    num_classes: int = 0  # 0 where targets are numbers
    notation: Notation | None = None  # how the target's texts write numbers, if they do


class NumberRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of numbers: inputs (features,) float32 or as they are stored, and the target. It draws no random numbers."""

    def __init__(self, store: RowStore, selection: RowSelection, roles: RowRoles) -> None:
        self.store, self.selection, self.roles = store, selection, roles
        self.num_classes = roles.num_classes
        columns = [store.columns[name] for name in roles.inputs]
        self.shape = (len(columns),) if roles.stacked else columns[0].shape
        stored = np.dtype(columns[0].dtype)
        self.dtype = np.dtype(np.float32) if roles.stacked or stored in (np.float64, np.bool_) else stored

    def __len__(self) -> int:
        return len(self.selection)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.fetch_batch(np.array([index]))
        return inputs[0], targets[0]

    def fetch_batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs (n, …) and targets (n, …) of some samples."""
        dtype = torch.from_numpy(np.empty(0, self.dtype)).dtype
        inputs = torch.empty((len(indices), *self.shape), dtype=dtype)  # aligned by torch, so sums have the same bits
        return inputs, self.fetch_into(indices, inputs.numpy(), range(len(indices)))

    def fetch_into(self, indices: np.ndarray, out: np.ndarray, at: Sequence[int]) -> Tensor:
        """Write the inputs of some samples to the entries `at` of a batch, which ascend; returns their targets.

        Raises RequestError if a row has NaN or infinity, since only a part of the rows is read before training.
        """
        rows = self.selection.find_rows(indices)
        for column, name in enumerate(self.roles.inputs):
            self.store.read_into(name, rows, out[:, column] if self.roles.stacked else out, at)
        # in a mixture the other entries are not written yet; a copy would take longer than the check
        values = out if len(out) == len(rows) else out[at]
        _check_finite(values, rows, self.store, self.roles.inputs)
        return read_targets(self.store, rows, self.roles)


class TokenRows(NumberRows):
    """Rows of tokens: inputs (t,) int64, and the tokens that follow each as targets; -100 behind the last.

    Where the target is another column (labels), it holds a label beside each token, and is moved by one as well.
    """

    def __init__(self, store: RowStore, selection: RowSelection, roles: RowRoles) -> None:
        super().__init__(store, selection, roles)
        self.dtype = np.dtype(np.int64)

    def fetch_into(self, indices: np.ndarray, out: np.ndarray, at: Sequence[int]) -> Tensor:
        """Write the tokens (n, t) of some samples to the entries `at` of a batch; returns their targets (n, t)."""
        rows = self.selection.find_rows(indices)
        (name,) = self.roles.inputs
        tokens = self.store.read(name, rows).astype(np.int64)
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= self.num_classes:
            wrong = least if least < 0 else most
            problem = f"--data: {self.store.label}: token {wrong} is beyond the vocabulary of {self.num_classes}"
            raise RequestError(problem, remedy="a larger data.args.vocabulary")
        labels = tokens if self.roles.target == name else self.store.read(self.roles.target, rows).astype(np.int64)
        targets = np.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
        out[at] = tokens
        return torch.from_numpy(targets)


class ImageRows(Dataset[tuple[Tensor, Tensor]]):
    """Bytes (3, size, size) of an encoded image, and the target; resized and cut as in --data image-folder."""

    def __init__(
        self, store: RowStore, selection: RowSelection, roles: RowRoles, sizes: tuple[int, int], *, augment: bool
    ) -> None:
        self.store, self.selection, self.roles = store, selection, roles
        self.size, self.resize = sizes
        self.augment, self.num_classes = augment, roles.num_classes

    def __len__(self) -> int:
        return len(self.selection)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rows = self.selection.find_rows([index])
        (name,) = self.roles.inputs
        (content,) = self.store.read(name, rows)
        pixels = decode_image(content, self.resize, f"--data: {self.store.label}: row {rows[0]}, column {name!r},")
        return cut_square(pixels, self.size, augment=self.augment), read_targets(self.store, rows, self.roles)[0]


def read_targets(store: RowStore, rows: Sequence[int] | np.ndarray, roles: RowRoles) -> Tensor:
    """(n,) int64 class numbers, or (n, …) float32, all finite; RequestError: training does not know a row's label."""
    found = read_texts(store, roles.target, rows, roles.notation) if roles.notation else store.read(roles.target, rows)
    if not roles.num_classes:
        found = np.asarray(found, dtype=np.float32)
        _check_finite(found, rows, store, [roles.target])
        return torch.from_numpy(found)
    if roles.labels is None:
        return torch.from_numpy(np.asarray(found).astype(np.int64))
    values = found.tolist() if isinstance(found, np.ndarray) else found
    numbers = [roles.labels.get(value) for value in values]
    if None in numbers:
        at = numbers.index(None)
        raise RequestError(
            f"--data: {store.label}: row {int(rows[at])} has the label {values[at]!r}, which is none of the "
            f"{roles.num_classes} classes",
            remedy="data.args.classes=[…], all of them; or leave out such rows",
        )
    return torch.from_numpy(np.array(numbers))


def read_texts(store: RowStore, name: str, rows: Sequence[int] | np.ndarray, notation: Notation) -> np.ndarray:
    """Return the numbers (n,) float64 that a column of texts contains; RequestError names a row without a number."""
    texts = store.read(name, rows)
    numbers = [notation.read(text) for text in texts]
    if None in numbers:
        at = numbers.index(None)
        problem = f"--data: {store.label}: row {int(rows[at])}, from 0, has {texts[at]!r} in column {name!r}"
        raise RequestError(
            f"{problem}, which is not a number, as in other rows",
            remedy="numbers in all rows; or --set data.kind=classification, if they are classes",
        )
    return np.array(numbers, dtype=np.float64)


def _check_finite(values: np.ndarray, rows: Sequence[int] | np.ndarray, store: RowStore, names: Sequence[str]) -> None:
    """Raise RequestError if the values of some rows, (n, …) of one column or (n, columns), have NaN or infinity."""
    if values.dtype.kind == "f" and not (is_finite := np.isfinite(values)).all():
        place = np.argwhere(~is_finite)[0]
        name = names[place[1] if len(names) > 1 else 0]
        problem = f"--data: {store.label}: row {rows[place[0]]}, from 0, has NaN or infinity in column {name!r}"
        raise RequestError(problem, remedy=f"fill or leave out such rows before, or data.ignore={name}")
