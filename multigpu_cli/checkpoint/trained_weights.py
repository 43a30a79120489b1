"""The trained weights of a run, with its settings: read tensor by tensor where they are large."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from multigpu_cli.checkpoint.manifest import MANIFEST, find_damage, read_manifest
from multigpu_cli.checkpoint.serialize import deserialize
from multigpu_cli.checkpoint.store import Checkpoint, Store
from multigpu_cli.checkpoint.weights import check_fit, is_state_dict
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.tensor_tree import name_tensor


@dataclass(frozen=True)
class TrainedWeights:
    """The trained weights of a run, with the settings of that run.

    Attributes:
        origin: the file that they are in, or the folder of a checkpoint where several files hold them.
        outline: names → tensors; the averaged weights if the run used --ema. Those in pieces are on the meta device.
        settings: of the run, by key.
        model: name of the model, None where it follows from the settings.
        read_piece: the tensor in pieces of a name and an outline.
    """

    origin: Path
    outline: dict[str, Any]
    settings: dict[str, Any]
    model: str | None = None
    read_piece: Callable[[str, Tensor], Tensor] | None = None

    @property
    def state(self) -> dict[str, Any]:
        """All tensors, whole."""
        return {name: self.read(name) for name in self.outline}

    def read(self, name: str) -> Any:
        """One entry, whole."""
        found = self.outline[name]
        return self.read_piece(name, found) if self.read_piece and _is_outline(found) else found

    def load_into(self, model: nn.Module) -> None:
        """Give a model these weights; of what is in pieces, one tensor at a time is in memory beside the model.

        Raises:
            RequestError: they do not fit it.
        """
        check_fit(model, self.outline, str(self.origin))
        own = model.state_dict()
        pieces = [name for name, found in self.outline.items() if _is_outline(found) and not is_lazy(own[name])]
        model.load_state_dict({name: self.read(name) for name in self.outline.keys() - pieces}, strict=not pieces)
        with torch.no_grad():
            for name in pieces:
                own[name].copy_(self.read(name))


def load_trained_weights(path: Path) -> TrainedWeights:
    """Find the weights of a run folder (the best ones), of best.pt or last.pt, or of a checkpoint.

    Raises:
        RequestError: the path is none of these, or the file is damaged, or contains more than tensors and plain values.
    """
    if path.is_file():
        return _from_file(path)
    if (path / "best.pt").is_file():
        return _from_file(path / "best.pt")
    newest = None if (path / MANIFEST).exists() else Store(path / "checkpoints", 1).find_newest()[0]
    folder = newest.folder if newest else path
    if not (folder / MANIFEST).is_file():
        raise RequestError(
            f"{path} contains no weights",
            remedy="name a run folder, its best.pt or last.pt, or a checkpoints/step_… folder",
        )
    if damage := find_damage(folder):
        raise RequestError(f"{folder}: {damage}", remedy="use an older checkpoint of that run, or its best.pt")
    return _from_checkpoint(Checkpoint(folder, read_manifest(folder)))


def _from_file(file: Path) -> TrainedWeights:
    found = deserialize(file, str(file))
    parts = found if isinstance(found, dict) else {}
    state, settings = parts.get("model"), parts.get("config")
    if not isinstance(settings, dict) or not isinstance(state, dict) or not is_state_dict(state):
        raise RequestError(
            f"{file} is not the best.pt or last.pt of a run", remedy="name a file that a run has written"
        )
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
