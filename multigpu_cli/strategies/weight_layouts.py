"""Weights that lie in memory as they do without sharding: kernels, and so the last bits, depend on it.

FSDP gathers each weight row by row, with the last dimension contiguous. A kernel with channels last, say, is copied
into that layout when its module runs; until the backward pass is done, the copy is there beside what FSDP frees.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from multigpu_cli.errors import RequestError

Strides = tuple[int, ...]


class WeightLayouts:
    """Remembers the layouts of a model's parameters, before it is sharded.

    Attributes:
        unusual: the strides of each parameter that is not laid out by rows, by all of its names.

    Raises:
        RequestError: rows of a parameter are not one after the other in memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.unusual = {
            name: parameter.stride()
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter.stride() != torch.empty(parameter.shape, device="meta").stride()
        }
        for name, strides in self.unusual.items():
            if strides[0] < max(strides):
                raise RequestError(
                    f"--exact together with --multi-gpu fsdp: {name} does not lie row by row in memory",
                    remedy="make it .contiguous() where the model is built, or use --multi-gpu ddp",
                )

    def restore_in_forward(self) -> None:
        """Let each module find its own weights in their layout while it runs."""
        for name, strides in self.unusual.items():
            owner, _, attribute = name.rpartition(".")
            module = self._model.get_submodule(owner)
            module.register_forward_pre_hook(partial(_lay_out, attribute, strides))
            module.register_forward_hook(partial(_forget, attribute), always_call=True)


def copy_to_layout(tensor: Tensor, strides: Strides | None) -> Tensor:
    """The tensor, as a copy with these strides; None: as it is."""
    if strides is None:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def sort_dims_by_stride(strides: Strides | None, ndim: int) -> Sequence[int]:
    """The dimensions from the outermost to the innermost."""
    return range(ndim) if strides is None else sorted(range(ndim), key=lambda dim: -strides[dim])


def _lay_out(attribute: str, strides: Strides, module: nn.Module, _: object) -> None:
    module.__dict__[attribute] = copy_to_layout(module._parameters[attribute], strides)  # type: ignore[arg-type]


def _forget(attribute: str, module: nn.Module, *_: object) -> None:
    module.__dict__.pop(attribute, None)
