"""Weights for use: best.pt and last.pt, the fingerprint of a model, whether weights fit it, and of which code it is.

A state dict holds tensors, and what `get_extra_state` of modules gives: all that `torch.load(weights_only=True)` reads.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from multigpu_cli.checkpoint.files import Moved, ignore_progress
from multigpu_cli.checkpoint.manifest import MANIFEST, check_extent, find_damage, read_manifest
from multigpu_cli.checkpoint.pieces import deserialize, serialize, write_state
from multigpu_cli.checkpoint.store import Checkpoint, Store
from multigpu_cli.distributed.world import World, broadcast_object
from multigpu_cli.errors import RequestError, make_line
from multigpu_cli.faults.explain import is_library_file
from multigpu_cli.runtime.module_state import name_tensor
from multigpu_cli.runtime.precision import DTYPES

_EXTRA = "_extra_state"  # how the name of what `get_extra_state` returns ends; torch's own word
_PLACES = ("model", "state_dict", "model_state_dict", "module")  # where programs put a state dict beside other things


def copy_to_host(value: Any) -> Any:
    """Copy a state dict, or any part of it, to host memory, so that training can continue; outlines stay outlines."""
    if isinstance(value, Tensor):
        return value if value.is_meta else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: copy_to_host(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([copy_to_host(entry) for entry in value])
    return copy(value)


def fingerprint(state: dict[str, Any]) -> str:
    """SHA-256 over weights and buffers, in order of names, as contiguous bytes."""
    digest = sha256()
    for name in sorted(state):
        if isinstance(value := state[name], Tensor):
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def round_weights(name: str, weights: Tensor, half: str | None) -> Tensor:
    """Return floating-point weights as `half`, bf16 or fp16; raise RequestError if a weight is beyond its range.

    Other tensors, or all if `half` is None, are returned unchanged.
    """
    if half is None or not weights.is_floating_point():
        return weights
    rounded = weights.to(DTYPES[half])
    if bool(weights.isfinite().all()) and not rounded.isfinite().all():
        raise RequestError(f"--dtype {half}: {name} has values beyond its range", remedy="--dtype bf16")
    return rounded


def extra_state(state: dict[str, Any]) -> dict[str, Any]:
    """What a state dict holds beside tensors."""
    return {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def broadcast_weights(model: nn.Module, world: World) -> None:
    """Give all ranks rank 0's weights: each may have drawn other random numbers."""
    if world.size > 1:
        state = model.state_dict()
        for value in state.values():
            if isinstance(value, Tensor):
                dist.broadcast(value, src=0)
        if extra := extra_state(state):
            state.update(broadcast_object(world, extra))
            model.load_state_dict(state)


def is_state_dict(state: object) -> TypeGuard[dict[str, Any]]:
    """Whether it is a state dict."""
    return (
        isinstance(state, dict)
        and all(isinstance(name, str) for name in state)
        and any(isinstance(value, Tensor) for value in state.values())
        and all(str(name).endswith(_EXTRA) for name in extra_state(state))
    )


def check_extra_state(model: nn.Module, name: str) -> None:
    """Refuse a model that does not take back, as from a checkpoint, what its modules tell by `get_extra_state`."""
    state = model.state_dict()
    for key, value in extra_state(state).items():
        origin = f"--model {name}: get_extra_state of {key.removesuffix(_EXTRA).rstrip('.') or 'the model'}"
        try:
            state[key] = deserialize(serialize(value), origin)
        except Exception as error:  # pickle raises anything for an object that it can't take
            problem = f"{origin} returns what could not be read back from a checkpoint without running code"
            remedy = "tensors and plain values: numbers, strings, lists and dicts of them"
            raise RequestError(problem, remedy=remedy) from error
    if not extra_state(state):
        return
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        problem = f"--model {name} cannot load its own state: {type(error).__name__}: {error}"
        raise RequestError(problem, remedy="make set_extra_state accept what get_extra_state returns") from error


def save_weights(
    path: Path, state: dict[str, Any], config: dict[str, Any], metrics: dict[str, Any], moved: Moved = ignore_progress
) -> str:
    """Write {"model", "config", "metrics"}, for `torch.load(path, weights_only=True)`; returns the file's SHA-256.

    The state lies in host memory, alone, since the file gets whole storages; it is not copied. `moved` is called for
    each piece that has reached the disk.
    """
    return str(write_state(path, {"model": state, "config": config, "metrics": metrics}, moved)["sha256"])


def read_weights(path: Path, flag: str = "") -> dict[str, Any]:
    """The state dict in best.pt, last.pt, a checkpoint's state.pt, or whatever else `torch.save` wrote one into.

    Its tensors are mapped from the file, if possible. RequestError, which names the flag: no such file or no weights.
    """
    if not path.is_file():
        raise RequestError(f"{flag} {path}: there is no such file".lstrip(), remedy="best.pt of a run folder")
    found = deserialize(path, f"{flag} {path}".lstrip())
    places = [found, *(found.get(key) for key in _PLACES)] if isinstance(found, dict) else []
    state = next((place for place in places if is_state_dict(place)), None)
    if state is None:
        problem = f"{flag} {path} holds no weights".lstrip()
        raise RequestError(problem, remedy=f"a state dict, or a file with one under {', '.join(map(repr, _PLACES))}")
    if any(value.is_meta for value in state.values() if isinstance(value, Tensor)):
        problem = f"{flag} {path} is only one part of a sharded checkpoint".lstrip()
        raise RequestError(problem, remedy="name the folder of the checkpoint, or best.pt of the run")
    return state


def check_fit(model: nn.Module, state: dict[str, Any], origin: str) -> None:
    """Compare names and shapes before anything is loaded; a RequestError lists the first few that differ."""
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in state]
    wrong += [f"{name} is not in the model" for name in state if name not in own]
    wrong += [
        f"{name} is {format_shape(state[name])}, the model has {format_shape(own[name])}"
        for name in own
        if name in state and not is_lazy(own[name]) and format_shape(state[name]) != format_shape(own[name])
    ]
    if wrong:
        problem = f"{origin} does not fit the model:\n{format_differences(wrong)}"
        raise RequestError(problem, remedy="the --model that the weights belong to")


def format_differences(lines: list[str]) -> str:
    """The first few, a line each, and how many more there are."""
    more = [f"… {len(lines) - 6} more"] if len(lines) > 6 else []
    return "\n".join(f"    {make_line(line)}" for line in [*lines[:6], *more])


def format_shape(value: Any) -> str:
    """'(3, 4)', or that an entry of a state dict is no tensor."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else "no tensor"


@dataclass(frozen=True)
class TrainedWeights:
    """The trained weights of a run, the averaged ones if it used --ema, with the settings of that run."""

    origin: Path  # the file that they are in, or the folder of a checkpoint where several files hold them
    outline: dict[str, Any]  # names → tensors; those in pieces are on the meta device
    settings: dict[str, Any]  # of the run, by key
    model: str | None = None  # name of the model; None if it follows from the settings
    read_piece: Callable[[str, Tensor], Tensor] | None = None  # the tensor in pieces of a name and an outline

    @property
    def state(self) -> dict[str, Any]:
        """All tensors, whole."""
        return {name: self.read(name) for name in self.outline}

    def read(self, name: str) -> Any:
        """One entry, whole."""
        found = self.outline[name]
        return self.read_piece(name, found) if self.read_piece and _is_outline(found) else found

    def load_into(self, model: nn.Module) -> None:
        """Give a model these weights, if they fit; of those in pieces, one tensor at a time is in memory beside it."""
        check_fit(model, self.outline, str(self.origin))
        own = model.state_dict()
        pieces = [name for name, found in self.outline.items() if _is_outline(found) and not is_lazy(own[name])]
        model.load_state_dict({name: self.read(name) for name in self.outline.keys() - pieces}, strict=not pieces)
        with torch.no_grad():
            for name in pieces:
                own[name].copy_(self.read(name))


def load_trained_weights(path: Path) -> TrainedWeights:
    """Find the weights of a run folder (the best ones), of best.pt or last.pt, or of a checkpoint.

    RequestError: the path is none of these, or the file is damaged, or contains more than tensors and plain values.
    """
    if path.is_file():
        return _from_file(path)
    if (path / "best.pt").is_file():
        return _from_file(path / "best.pt")
    newest = None if (path / MANIFEST).exists() else Store(path / "checkpoints").find_newest()[0]
    folder = newest.folder if newest else path
    if not (folder / MANIFEST).is_file():
        problem = f"{path} contains no weights"
        raise RequestError(problem, remedy="name a run folder, its best.pt or last.pt, or a checkpoints/step_… folder")
    if damage := find_damage(folder):
        raise RequestError(f"{folder}: {damage}", remedy="use an older checkpoint of that run, or its best.pt")
    return _from_checkpoint(Checkpoint(folder, read_manifest(folder)))


def _from_file(file: Path) -> TrainedWeights:
    found = deserialize(file, str(file))
    parts = found if isinstance(found, dict) else {}
    state, settings = parts.get("model"), parts.get("config")
    if not isinstance(settings, dict) or not is_state_dict(state):
        problem = f"{file} is not the best.pt or last.pt of a run"
        raise RequestError(problem, remedy="name a file that a run has written")
    try:
        check_extent(settings)
    except ValueError as error:
        raise RequestError(f"{file}: its settings are {error}", remedy="name a file that a run has written") from error
    return TrainedWeights(file, state, settings)


def _from_checkpoint(checkpoint: Checkpoint) -> TrainedWeights:
    """Its averaged weights, or else those that learn."""
    outline, settings = checkpoint.outline(), checkpoint.manifest["settings"]
    part, prefix = ("average", "module.") if outline["average"] else ("model", "")
    state = {name.removeprefix(prefix): value for name, value in outline[part].items()}
    if part == "average":
        state.pop("n_averaged", None)
    model = checkpoint.manifest["pins"]["model"]
    if not checkpoint.in_pieces:
        return TrainedWeights(checkpoint.folder / "state.pt", state, settings, model)
    pieces = checkpoint.open_pieces()

    def read(name: str, found: Tensor) -> Tensor:
        return pieces.read(name_tensor((part, prefix + name)), found)

    return TrainedWeights(checkpoint.folder, state, settings, model, read)


def _is_outline(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def describe_code(model: nn.Module) -> dict[str, dict[str, str]]:
    """SHA-256 of the places of each kind of layer, and under Python's version, whose trees are unlike others', of code.

    Code is that of the user's classes of the network, their bases, and what these name in their modules; comments,
    docstrings and format do not count. What has no source (compiled, or typed into a prompt) is left out, as are this
    program's own modules, and what SyncBatchNorm and a lazy layer's first pass change.
    """
    kinds = [type(module) for module in model.modules() if not type(module).__module__.startswith("multigpu_cli.")]
    layers: dict[str, str] = {}
    for place, kind in enumerate(kinds):
        name = "BatchNorm" if "BatchNorm" in kind.__name__ else kind.__name__.removeprefix("Lazy")
        layers[name] = sha256(f"{layers.get(name)} {place}".encode()).hexdigest()
    sources: dict[str, str] = {}
    waiting: list[Any] = list(dict.fromkeys(base for kind in kinds for base in kind.__mro__))
    for part in waiting:  # which grows
        file = getattr(module := sys.modules.get(part.__module__), "__file__", None)
        if not file or is_library_file(file) or part.__module__.startswith("multigpu_cli."):
            continue
        try:
            source = inspect.getsource(part)
            nodes = list(ast.walk(ast.parse(f"if 1:\n{source}" if source.startswith((" ", "\t")) else source)))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
                del node.body[0]
        name, named = part.__qualname__, [vars(module).get(node.id) for node in nodes if isinstance(node, ast.Name)]
        sources[name] = sha256(f"{sources.get(name)} {ast.dump(nodes[0])}".encode()).hexdigest()
        waiting += [each for each in named if isinstance(each, type | FunctionType) and each not in waiting]
    return {"layers": layers, "Python {}.{}".format(*sys.version_info): sources}


def name_changes(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> str:
    """The classes, functions and layers that differ, as far as both have them; "" for none."""
    names: set[str] = set()
    for kind, new in now.items():
        old = before.get(kind, new)
        compared = old.keys() | new.keys() if kind == "layers" else old.keys() & new.keys()
        names |= {name for name in compared if old.get(name) != new.get(name)}
    return make_line(", ".join(sorted(names)))
