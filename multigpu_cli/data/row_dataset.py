"""Rows of a store as samples: numbers by whole batches, tokens, and encoded images one by one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.data.collate import IGNORED
from multigpu_cli.data.decode_image import cut_square, decode_image
from multigpu_cli.data.row_store import RowStore
from multigpu_cli.data.spread_split import RowSelection
from multigpu_cli.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class RowRoles:
    """What the columns of a store are for.

    Attributes:
        inputs: the columns that the model sees.
        target: the column that it predicts.
        stacked: inputs are single numbers, side by side in a vector.
        labels: the class number of each value of the target, where these are not class numbers themselves.
        num_classes: 0 where targets are numbers.
    """

    inputs: tuple[str, ...]
    target: str
    stacked: bool = False
    labels: Mapping[Any, int] | None = None
    num_classes: int = 0


class NumberRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of numbers: inputs (features,) float32 or as they are stored, and the target.

    Attributes:
        num_classes: 0 where targets are numbers.
    """

    def __init__(self, store: RowStore, selection: RowSelection, roles: RowRoles) -> None:
        self.store, self.selection, self.roles = store, selection, roles
        self.num_classes = roles.num_classes

    def __len__(self) -> int:
        return len(self.selection)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.fetch_batch([index])
        return inputs[0], targets[0]

    def fetch_batch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs (n, …) and targets (n, …) of some samples."""
        rows = self.selection.find_rows(indices)
        return self.read_inputs(rows), read_targets(self.store, rows, self.roles)

    def read_inputs(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """(n, …) of rows of the store."""
        columns = [self.store.read(name, rows) for name in self.roles.inputs]
        if self.roles.stacked:
            return torch.from_numpy(np.stack([column.astype(np.float32) for column in columns], axis=1))
        (found,) = columns
        return torch.from_numpy(found.astype(np.float32) if found.dtype in (np.float64, np.bool_) else found)


class TokenRows(NumberRows):
    """Rows of tokens: inputs (t,) int64, and the tokens that follow each as targets; -100 behind the last.

    Where the target is another column (labels), it holds a label beside each token, and is moved by one as well.
    """

    def fetch_batch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs (n, t) and targets (n, t) of some samples."""
        rows = self.selection.find_rows(indices)
        (name,) = self.roles.inputs
        tokens = self.store.read(name, rows).astype(np.int64)
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= self.num_classes:
            wrong = least if least < 0 else most
            raise RequestError(
                f"--data: {self.store.label}: token {wrong} is beyond the vocabulary of {self.num_classes}",
                remedy="a larger data.args.vocabulary",
            )
        labels = tokens if self.roles.target == name else self.store.read(self.roles.target, rows).astype(np.int64)
        targets = np.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
        return torch.from_numpy(tokens), torch.from_numpy(targets)


class ImageRows(Dataset[tuple[Tensor, Tensor]]):
    """Bytes (3, size, size) of an encoded image, and the target; resized and cut as in --data image-folder.

    Attributes:
        num_classes: 0 where targets are numbers.
    """

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
    """(n,) int64 class numbers, or (n, …) float32.

    Raises:
        RequestError: a row has a label that training does not know.
    """
    found = store.read(roles.target, rows)
    if not roles.num_classes:
        return torch.from_numpy(np.asarray(found, dtype=np.float32))
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
    return torch.tensor(numbers)
