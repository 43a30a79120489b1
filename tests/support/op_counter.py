"""Counts what is asked of a device, on any device: each operation that is no view is at least one kernel."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Follows the operations inside.

    Attributes:
        inputs: the name of each, and the tensors that it was called with.
        kernels: how many of them are no views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[tuple[str, list[Tensor]]] = []
        self.kernels = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        self.inputs.append((name, [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]))
        self.kernels += not func.is_view
        return func(*args, **kwargs or {})
