"""`RowStore`: rows of named columns that stay on the disk, whatever the format of their files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a store.

    Attributes:
        name: as the files call it.
        kind: number, of a fixed shape; bytes (an encoded image, say), text, or other, which nobody reads.
        shape: of the numbers in one row.
        dtype: NumPy's name of their type.
        class_names: the names of the classes that the numbers stand for, where the files say so.
        gaps: rows without a value, as far as the files say it.
        description: the type in the words of the files, for messages.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    class_names: tuple[str, ...] = ()
    gaps: int = 0
    description: str = ""

    @property
    def is_integer(self) -> bool:
        return self.kind == "number" and np.dtype(self.dtype).kind in "iub"


class RowStore(Protocol):
    """Rows on the disk; reading is safe in forked processes, and a pickled store opens its files anew.

    Attributes:
        label: its files, for messages.
        columns: by name, in the files' order.
    """

    label: str
    columns: dict[str, Column]

    def __len__(self) -> int: ...

    def read(self, name: str, rows: Sequence[int] | np.ndarray) -> Any:
        """A column of some rows: (n, *shape) numbers, or a list of bytes or texts.

        Raises:
            RequestError: a row has no such value; names it.
        """

    def read_into(self, name: str, rows: Sequence[int] | np.ndarray, out: np.ndarray, at: Sequence[int]) -> None:
        """Write a column of numbers of some rows to the entries `at` of (n, *shape), whatever its type.

        Raises:
            RequestError: as `read`.
        """

    def list_values(self, name: str) -> list[Any]:
        """The different values of a column of single numbers or texts, in any order.

        Raises:
            RequestError: too many rows to read them all for that.
        """
