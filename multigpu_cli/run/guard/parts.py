"""Whether the loss of a batch is the sum of its halves' losses, and which module lets samples influence each other."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from multigpu_cli.data.loader import Batch
from multigpu_cli.run.guard.watch import find_caller

_CLOSE = 1e-5  # relative difference between a sum and its parts by rounding of float32


class Row(NamedTuple):
    """The output of a module for a batch, which may have a row for each sample."""

    module: str  # 'path (Class)'
    output: Tensor


def halve(batch: Batch) -> list[Batch]:
    """Return both halves of a batch; [] if it is odd, or inputs or targets do not have one row for each sample."""
    size = len(batch)
    if size % 2 or batch.tokens is not None:
        return []
    try:
        return [_take_rows(batch, slice(0, size // 2)), _take_rows(batch, slice(size // 2, size))]
    except TypeError:
        return []


def _take_rows(batch: Batch, rows: slice) -> Batch:
    """Return some samples of a batch. TypeError if something has no row for each of them."""

    def take(value: Any) -> Any:  # Any: inputs may be of any type
        if isinstance(value, dict):
            return {key: take(entry) for key, entry in value.items()}
        if type(value) is tuple:
            return tuple(take(entry) for entry in value)
        if value is None:
            return None
        if (isinstance(value, list) or (isinstance(value, Tensor) and value.ndim)) and len(value) == len(batch):
            return value[rows]
        raise TypeError

    indices = batch.sample_indices[rows]
    return replace(batch, inputs=take(batch.inputs), targets=take(batch.targets), sample_indices=indices)


@contextmanager
def additive_mode(model: nn.Module) -> Iterator[None]:
    """Have torch's norms of a batch as in an evaluation, and no dropout: for good reasons these depend on the batch."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, _NormBase | _DropoutNd | nn.RReLU):
                stack.callback(setattr, module, "training", module.training)
                module.training = False
            if isinstance(module, nn.RNNBase):
                stack.callback(setattr, module, "dropout", module.dropout)
                module.dropout = 0.0
        yield


class Sums(NamedTuple):
    """The loss of a batch, and those of its halves."""

    whole: float
    halves: Sequence[float]

    @property
    def of_halves(self) -> float:
        return sum(self.halves)

    def is_sum(self, factor: float = 1.0, tolerance: float = _CLOSE) -> bool:
        """Return whether the halves add up to `factor` times the whole; True if a loss is infinite or NaN."""
        size = max(abs(self.whole), sum(map(abs, self.halves)))
        return not abs(self.of_halves - factor * self.whole) > tolerance * size + _CLOSE


@contextmanager
def record_rows(model: nn.Module, rows: list[Row]) -> Iterator[None]:
    """Append the output of each module."""

    def note(name: str, module: nn.Module, output: object) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if tensors and tensors[0].ndim:
            rows.append(Row(f"{name or 'model'} ({type(module).__name__})", tensors[0].detach().clone()))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(lambda owner, _, output, name=name: note(name, owner, output))
            stack.callback(hook.remove)
        yield


def find_mixing(whole: Sequence[Row], halves: Sequence[Sequence[Row]], tolerance: float) -> str:
    """Return the first module whose rows depend on other rows, or an empty string."""
    row: Row
    parts: list[Row]
    for row, *parts in zip(whole, *halves, strict=False):
        outputs = [part.output for part in parts]
        same = all(part.module == row.module and part.output.ndim == row.output.ndim for part in parts)
        if not same or any(part.shape[1:] != row.output.shape[1:] for part in outputs):
            continue
        joined = torch.cat(outputs)
        if joined.shape == row.output.shape and bool(
            (joined - row.output).abs().max() > tolerance * row.output.abs().max() + _CLOSE
        ):
            return row.module
    return ""


class ForwardOnly(nn.Module):
    """A model as DDP wraps it, which notes uses other than its call, by name with file:line."""

    def __init__(self, model: nn.Module, uses: dict[str, str]) -> None:
        super().__init__()
        self.module = model
        self.training = model.training
        self._uses = uses

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # Any: whatever the model takes and returns
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.module, name)
            if location := find_caller():
                self._uses.setdefault(name, location)
            return value
