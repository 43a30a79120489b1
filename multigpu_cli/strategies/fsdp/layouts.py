"""Weights that lie in memory as they do without sharding: kernels, and so the last bits, depend on it.

FSDP gathers each weight row by row, with the last dimension contiguous. A kernel with channels last, say, is copied
into that layout when its module runs; until the backward pass is done, the copy is there beside what FSDP frees.

Optimizer steps on rows have the bits of a step on the whole weight. A kernel takes a vector of numbers at a time, and
what is left at the end of a tensor one by one: on a CPU with other rounding (fused AdamW and SGD), on a GPU perhaps.
Rows end elsewhere than the whole. Where their number is not a multiple of any vector's, they are therefore copied for
the step, with zeros around them, into a tensor that ends as the whole does.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

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


_BLOCK = 64  # a multiple of the numbers in any vector, and in two of them, which torch takes at a time


class _Piece(NamedTuple):
    """Where rows lie in their padded copy.

    Attributes:
        rows: a parameter of the optimizer.
        order: its dimensions, the outermost in the whole tensor's memory first.
        before, after: numbers around the rows.
    """

    rows: Tensor
    order: tuple[int, ...]
    before: int
    after: int

    def pad(self, value: Tensor) -> Tensor:
        """(n,) the rows, or a state of their shape, between zeros."""
        return torch.nn.functional.pad(value.permute(self.order).flatten(), (self.before, self.after))

    def cut(self, padded: Tensor) -> Tensor:
        """A tensor in the shape of the rows, the opposite of `pad`."""
        inner = padded[self.before : self.before + self.rows.numel()]
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return inner.view([self.rows.shape[dim] for dim in self.order]).permute(inverse)


class SimdTails:
    """Pads the rows that need it before each step of an optimizer, and takes the result back after it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._pieces: dict[Tensor, _Piece] = {}
        self._padded: dict[Tensor, _Piece] = {}  # during a step
        optimizer.register_step_pre_hook(self._pad)
        optimizer.register_step_post_hook(self._cut)

    def add(self, rows: Tensor, start: int, whole: int, strides: Strides | None) -> None:
        """Let rows end as their weight does.

        Args:
            rows: a parameter of the optimizer.
            start: numbers of the weight before them. whole: numbers of the weight.
            strides: of the weight, if they are unusual.
        """
        behind = whole - start - rows.numel()
        ends_alike = rows.numel() % _BLOCK == 0 and (behind >= _BLOCK or whole % _BLOCK == 0)
        if rows.numel() and not ends_alike:
            before, after = (0, _BLOCK) if behind >= _BLOCK else (start % _BLOCK, behind)
            self._pieces[rows] = _Piece(rows, tuple(sort_dims_by_stride(strides, rows.ndim)), before, after)

    @torch.no_grad()
    def _pad(self, *_: object) -> None:
        groups = self._optimizer.param_groups
        self._order = dict.fromkeys([*self._optimizer.state, *(rows for group in groups for rows in group["params"])])
        for group in groups:
            group["params"] = [self._pad_parameter(rows) for rows in group["params"]]

    def _pad_parameter(self, rows: Tensor) -> Tensor:
        if (piece := self._pieces.get(rows)) is None:
            return rows
        padded = torch.nn.Parameter(piece.pad(rows))
        padded.grad = None if rows.grad is None else piece.pad(rows.grad)
        if rows in self._optimizer.state:
            state = self._optimizer.state[rows]
            self._optimizer.state[padded] = {
                key: piece.pad(value) if _is_like(value, rows) else value for key, value in state.items()
            }
        self._padded[padded] = piece
        return padded

    @torch.no_grad()
    def _cut(self, *_: object) -> None:
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            group["params"] = [self._cut_parameter(parameter) for parameter in group["params"]]
        for parameter in self._order:  # that of all workers, which gather the state together
            if parameter in state:
                state[parameter] = state.pop(parameter)

    def _cut_parameter(self, padded: Tensor) -> Tensor:
        if (piece := self._padded.pop(padded, None)) is None:
            return padded
        piece.rows.copy_(piece.cut(padded))
        for key, value in self._optimizer.state.pop(padded, {}).items():
            state = self._optimizer.state[piece.rows]  # made where it is missing: only if the step made one
            if not _is_like(value, padded):
                state[key] = value
            elif key in state:
                state[key].copy_(piece.cut(value))
            else:
                state[key] = piece.cut(value).clone(memory_format=torch.contiguous_format)
        return piece.rows


def _is_like(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape
