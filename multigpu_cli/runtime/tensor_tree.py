"""The tensors of a state: nested dicts, lists and tuples, each with a place and a name."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

TensorPath = tuple[Any, ...]
"""The keys that lead to a tensor: "optimizer", "state", 3, "exp_avg"."""


def map_tensors(value: Any, work: Callable[[TensorPath, Tensor], Any], path: TensorPath = ()) -> Any:
    """The same state with each tensor replaced by what `work` returns, in an order that is the same on every rank."""
    if isinstance(value, Tensor):
        return work(path, value)
    if isinstance(value, dict):
        return {key: map_tensors(entry, work, (*path, key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(entry, work, (*path, place)) for place, entry in enumerate(value))
    return value


def name_tensor(path: TensorPath) -> str:
    """Its name in a file: "model.0.weight", "optimizer.state.3.exp_avg"."""
    return ".".join(map(str, path))
