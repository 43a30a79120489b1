"""Notices tensors that were changed in place, by torch's own count of such changes."""

from typing import Any

from torch import Tensor

from multigpu_cli.runtime.tensor_tree import map_tensors, name_tensor


class TensorVersions:
    """The tensors of nested dicts, lists and tuples, with the count of changes that each has had.

    torch counts what it does to a tensor itself; a change through `.data`, or through an array of NumPy's, is not seen.
    """

    def __init__(self, tensors: Any) -> None:
        self._seen: list[tuple[str, Tensor, int]] = []
        map_tensors(tensors, lambda path, tensor: self._seen.append((name_tensor(path), tensor, tensor._version)))

    def find_changed(self) -> str:
        """The name of the first tensor that has changed since; "" if none has."""
        return next((name for name, tensor, version in self._seen if tensor._version != version), "")
