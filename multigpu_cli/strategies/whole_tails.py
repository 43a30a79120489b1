"""Optimizer steps on rows with the bits of a step on the whole weight.

A kernel takes a vector of numbers at a time, and what is left at the end of a tensor one by one: on a CPU with other
rounding (fused AdamW and SGD), on a GPU perhaps. Rows end elsewhere than the whole. Where their number is not a
multiple of any vector's, they are therefore copied for the step, with zeros around them, into a tensor that ends as the
whole does.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multigpu_cli.strategies.weight_layouts import Strides, sort_dims_by_stride

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


class WholeTails:
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
