"""Copies batches from host memory to a GPU, one batch ahead of the step that needs it."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from multigpu_cli.data.token_counts import TokenCounts


class Fetched(NamedTuple):
    """Samples that were fetched as a batch, with their indices in the dataset."""

    inputs: Any
    targets: Any
    indices: Tensor
    tokens: TokenCounts | None = None


def move_batches(batches: Iterable[Fetched], device: torch.device, *, pin: bool = False) -> Iterator[Fetched]:
    """The same batches with inputs and targets on the device.

    On CUDA the next batch is copied on its own stream while the current one is being processed.

    Args:
        pin: copy to page-locked memory first, if the tensors are not there yet.
    """
    if device.type != "cuda":
        for batch in batches:
            yield batch._replace(inputs=_there(batch.inputs, device), targets=_there(batch.targets, device))
        return
    stream = torch.cuda.Stream(device)
    ready: Fetched | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            there = _there(batch.inputs, device, pin=pin), _there(batch.targets, device, pin=pin)
        if ready:
            yield ready
        now = torch.cuda.current_stream(device)
        now.wait_stream(stream)  # delays only the next step: the current one is already queued
        for tensor in tree_leaves(there):
            if isinstance(tensor, Tensor):
                tensor.record_stream(now)
        ready = Fetched(*there, batch.indices, batch.tokens)
    if ready:
        yield ready


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device; on CUDA from page-locked memory, so that the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _there(value: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Copy every tensor in nested dicts, lists and tuples to the device; other values are unchanged."""
    if isinstance(value, Tensor):  # tree_map_only takes 10 µs
        return (value.pin_memory() if pin else value).to(device, non_blocking=True)
    return tree_map_only(
        Tensor, lambda tensor: (tensor.pin_memory() if pin else tensor).to(device, non_blocking=True), value
    )
