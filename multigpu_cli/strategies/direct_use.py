"""Finds a weight that is used outside of the module that gathers it, such as linear(x, model.head.weight)."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode


def find_direct_use(work: Callable[[], object], names: Mapping[DTensor, str]) -> str:
    """The name of the sharded parameter on which a pass that fails does so; "" if it fails on something else."""
    watch = _Watch(names)
    with watch, suppress(RuntimeError):
        work()
    return watch.found


class _Watch(TorchFunctionMode):
    def __init__(self, names: Mapping[DTensor, str]) -> None:
        super().__init__()
        self._names, self.found = names, ""  # the first that failed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            given = [*args, *(kwargs or {}).values()]
            found = (self._names[each] for each in given if isinstance(each, DTensor) and each in self._names)
            self.found = self.found or next(found, "")
            raise
