"""How the selftest compares what it can't keep: numbers that tell tensors apart, and bits of nested states."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.data.loader import Batch


class ActivationRecorder:
    """Notes [name, kind, marks] of what each module of a model says, in the order in which they finish."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._outputs: list[Any] = []

    def __enter__(self) -> list[Any]:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_hook(self._record_into(name or "the model")))
        return self._outputs

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record_into(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            self._outputs.append([name, type(module).__name__, compute_checksums(output)])

        return note


def compute_checksums(value: Any) -> list[float]:
    """Two numbers for each tensor in a nested value: its mean size, and a sum that tells its elements apart."""
    numbers = []
    for tensor in _list_tensors(value):
        flat = tensor.detach().flatten().to("cpu", torch.float64)
        numbers += [float(flat.abs().mean()), float((flat * torch.arange(len(flat)).cos()).mean())]
    return numbers


def hash_state(value: Any) -> str:
    """SHA-256 over a nested value: tensors by their bytes, all else as text; clocks are left out."""
    digest = sha256()
    for name, part in _iterate_leaves(value, ""):
        if "seconds" not in name:
            plain = part.detach().cpu().contiguous().flatten() if isinstance(part, Tensor) else None
            content = repr(part).encode() if plain is None else plain.view(torch.uint8).numpy().tobytes()
            digest.update(name.encode() + content)
    return digest.hexdigest()


def max_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between the tensors of two states, relative to the largest entry."""
    tensors = {name: value.double() for name, value in one.items() if isinstance(value, Tensor) and value.numel()}
    largest = max((float(value.abs().max()) for value in tensors.values()), default=0.0) or 1.0
    gaps = (float((value - other[name].double()).abs().max()) for name, value in tensors.items())
    return max(gaps, default=0.0) / largest


def _iterate_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else None
    if pairs is None:
        yield name, value
        return
    for key, entry in pairs:
        yield from _iterate_leaves(entry, f"{name}.{key}")


def _list_tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in _iterate_leaves(value, "") if isinstance(leaf, Tensor) and leaf.numel()]


def split_batch(batch: Batch) -> Iterator[Any]:
    """The samples of a collated batch, one by one."""
    for at in range(len(batch)):
        yield [_select_sample(batch.inputs, at), _select_sample(batch.targets, at)]


def move_to_device(value: Any, device: torch.device) -> Any:
    """A nested value with its tensors on a device."""
    if isinstance(value, dict):
        return {name: move_to_device(entry, device) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(move_to_device(entry, device) for entry in value)
    return value.to(device) if isinstance(value, Tensor) else value


def _select_sample(value: Any, at: int) -> Any:
    """One sample of a collated batch."""
    if isinstance(value, dict):
        return {name: _select_sample(entry, at) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_select_sample(entry, at) for entry in value]
    return value[at]
