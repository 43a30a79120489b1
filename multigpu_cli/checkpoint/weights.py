"""Weights for use: best.pt and last.pt, the fingerprint of a model, and starting from somebody's weights."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.packing import packed, unpacked
from multigpu_cli.errors import RequestError


def host_copy(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict in host memory of its own, so that training can go on while it is written."""
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


def fingerprint(state: dict[str, Tensor]) -> str:
    """SHA-256 over weights and buffers, in order of names, as contiguous bytes."""
    digest = sha256()
    for name in sorted(state):
        digest.update(state[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_weights(path: Path, state: dict[str, Tensor], config: dict[str, Any], metrics: dict[str, Any]) -> str:
    """Write {"model", "config", "metrics"}, for `torch.load(path, weights_only=True)`; returns the file's SHA-256."""
    content = packed({"model": host_copy(state), "config": config, "metrics": metrics})
    publish(path, content)
    return sha256(content).hexdigest()


def read_weights(path: Path, flag: str = "") -> dict[str, Tensor]:
    """The state dict in best.pt, last.pt, a checkpoint's state.pt, or a plain `torch.save(model.state_dict())`.

    Raises:
        RequestError: no such file, or no weights in it; the message begins with the flag that named it.
    """
    if not path.is_file():
        raise RequestError(f"{flag} {path}: there is no such file".lstrip(), remedy="best.pt of a run folder, say")
    found = unpacked(path.read_bytes(), f"{flag} {path}".lstrip())
    state = found.get("model", found) if isinstance(found, dict) else found
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise RequestError(
            f"{flag} {path} holds no weights".lstrip(), remedy="a state dict, or a file with one under 'model'"
        )
    return state


def warm_start(model: nn.Module, path: Path) -> None:
    """--init-from: load weights that must fit the model name by name.

    Raises:
        RequestError: names or shapes differ; says which.
    """
    state = read_weights(path, "--init-from")
    check_fit(model, state, f"--init-from {path}")
    model.load_state_dict(state)


def check_fit(model: nn.Module, state: dict[str, Tensor], origin: str) -> None:
    """Compare names and shapes before anything is loaded.

    Raises:
        RequestError: lists the first few that differ.
    """
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in state]
    wrong += [f"{name} is not in the model" for name in state if name not in own]
    wrong += [
        f"{name} is {tuple(state[name].shape)}, the model has {tuple(own[name].shape)}"
        for name in own
        if name in state and not is_lazy(own[name]) and state[name].shape != own[name].shape
    ]
    if wrong:
        more = [f"… {len(wrong) - 6} more"] if len(wrong) > 6 else []
        listed = "\n".join(f"    {line}" for line in [*wrong[:6], *more])
        raise RequestError(f"{origin} does not fit the model:\n{listed}", remedy="the --model that it came from")
