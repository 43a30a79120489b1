"""How the selftest compares tensors without storing them: checksums of tensors, and hashes of nested states."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from multigpu_cli.data.loader import Batch


class ActivationRecorder:
    """Records [name, kind, checksums] of each module's output, in the order in which the modules finish."""

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
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            self._outputs.append([name, type(module).__name__, compute_checksums(output)])

        return record


def compute_checksums(value: Any) -> list[float]:
    """Two numbers for each tensor in a nested value: its mean size, and a sum that tells its elements apart."""
    numbers = []
    for _, leaf in _iterate_leaves(value, ""):
        if isinstance(leaf, Tensor) and leaf.numel():
            flat = leaf.detach().flatten().to("cpu", torch.float64)
            numbers += [float(flat.abs().mean()), float((flat * torch.arange(len(flat)).cos()).mean())]
    return numbers


def hash_state(value: Any) -> str:
    """SHA-256 over a nested value: tensors by their bytes, all else as text; measured seconds are left out."""
    digest = sha256()
    for name, part in _iterate_leaves(value, ""):
        if "seconds" not in name:
            if isinstance(part, Tensor):
                content = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            else:
                content = repr(part).encode()
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


def split_batch(batch: Batch) -> Iterator[Any]:
    """The samples of a collated batch, one by one."""
    for at in range(len(batch)):
        sides = [side for side in (batch.inputs, batch.targets) if side is not None]
        yield [_select_sample(side, at, len(batch)) for side in sides]


def _select_sample(value: Any, at: int, count: int) -> Any:
    """One sample of a batch of so many; a list of as many has one in each place."""
    if isinstance(value, dict):
        return {name: _select_sample(entry, at, count) for name, entry in value.items()}
    if isinstance(value, tuple) or (isinstance(value, list) and len(value) != count):
        return [_select_sample(entry, at, count) for entry in value]
    return value[at]


def move_to_device(value: Any, device: torch.device) -> Any:
    """A nested value with its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
