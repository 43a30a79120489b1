"""Restores a module's buffers or training mode; walks and sends trees of tensors; notices changed tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from multigpu_cli.distributed.world import World, broadcast_object


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the values of all buffers on exit, also of buffers that a forward pass replaced by another tensor.

    Buffers that no checkpoint contains stay if their shape changed: a cache that grows often comes with an attribute
    that has its length. Buffers that are created in the meantime stay as well, as when a checkpoint is loaded: a first
    pass may create parts.
    """
    before = [
        (owner._buffers, name, buffer, buffer.clone(), name in owner._non_persistent_buffers_set)
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        values: dict[Tensor, Tensor] = {}
        for owner, name, buffer, value, volatile in before:
            if not volatile or getattr(owner.get(name), "shape", value.shape) == value.shape:
                owner[name], values[buffer] = buffer, value
        if values:
            with torch.no_grad():
                torch._foreach_copy_(list(values), list(values.values()))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's mode and all buffers are restored on exit.

    Not `torch.inference_mode`: tensors that a model caches in such a pass (a table, a mask, a lazy layer's weights)
    could not be used in training afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), preserve_buffers(model):
            yield
    finally:
        for module, training in modes:
            module.training = training


TensorPath = tuple[Any, ...]  # the keys that lead to a tensor: "optimizer", "state", 3, "exp_avg"


def map_tensors(value: Any, work: Callable[[TensorPath, Tensor], Any], path: TensorPath = ()) -> Any:
    """The same state with each tensor replaced by what `work` returns, in an order that is the same on every rank."""
    if isinstance(value, Tensor):
        return work(path, value)
    if isinstance(value, dict):
        return {key: map_tensors(entry, work, (*path, key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(entry, work, (*path, place)) for place, entry in enumerate(value))
    return value


def broadcast_outline(world: World, state: Any, source: int) -> Any:
    """The source's state on every rank, with an outline (on the meta device) in the place of each tensor."""
    outline = None
    if world.rank == source:
        outline = map_tensors(state, lambda _, value: torch.empty_like(value, device="meta"))
    return broadcast_object(world, outline, source=source)


def broadcast_tensor(world: World, outline: Tensor, state: Any, path: TensorPath, source: int) -> Tensor:
    """The tensor at this place of the source's state, on each rank's device, with the strides that it has there."""
    whole = torch.empty_strided(outline.shape, outline.stride(), dtype=outline.dtype, device=world.device)
    if world.rank == source:
        whole.copy_(reduce(getitem, path, state))
    if whole.numel():
        dist.broadcast(whole.as_strided((whole.numel(),), (1,)).view(torch.uint8), src=source)
    return whole


def name_tensor(path: TensorPath) -> str:
    """Its name in a file: "model.0.weight", "optimizer.state.3.exp_avg"."""
    return ".".join(map(str, path))


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
