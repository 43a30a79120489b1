"""Starting weights (--init-from): read from the files that people have, matched by name, and loaded.

Nothing but tensors and plain values is read, so no code runs. Files are mapped into memory: what the model takes is
copied from there into its parameters, and there is no second copy of the file.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from multigpu_cli.checkpoint.files import compute_sha256
from multigpu_cli.checkpoint.manifest import BEST, MANIFEST, find_damage, is_piece, read_manifest
from multigpu_cli.checkpoint.store import Checkpoint
from multigpu_cli.checkpoint.weights import format_differences, format_shape, read_weights
from multigpu_cli.config.paths import find_weight_file
from multigpu_cli.config.regular_files import read_small, refuse_special_file
from multigpu_cli.errors import RequestError, pluralize

# Of DDP, torch.compile, Lightning, and our own language/hugging_face.py.
_PREFIXES = ("module.", "_orig_mod.", "model.", "network.")
_OF_PEFT = (".modules_to_save.default.", ".default.")  # its files leave it out
_LISTED = 4  # names in a line of the table; the journal has all


class WeightMatch(NamedTuple):
    """How the tensors of a file fall to those of a model."""

    loaded: dict[str, str]  # name in the model → name in the file
    initialised: dict[str, str]  # name in the model that stays as it was initialised → how the file differs
    unused: list[str]  # names in the file that nothing in the model takes

    @property
    def differences(self) -> list[str]:
        """What keeps the file from being the model's own, a line each."""
        return [*self.initialised.values(), *(f"{name} is not in the model" for name in self.unused)]

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line that people see."""
        return [
            ("loaded", _count_names(self.loaded)),
            ("as initialised", _count_names(self.initialised.values(), "; ")),
            ("not used", _count_names(self.unused)),
        ]


def load_initial_weights(model: nn.Module, path: Path, *, partial: bool) -> WeightMatch:
    """--init-from: load what fits the model by name and shape; with `partial`, the rest stays as it is initialised.

    Weights that are to keep what is loaded into others are not looked for: a module's `initial_copies` has a part of
    their names → what stands there in the names of the others. A RequestError says what does not fit.
    """
    copies = {part: of for each in model.modules() for part, of in getattr(each, "initial_copies", {}).items()}
    states = read_initial_weights(path), model.state_dict()
    found, own = ({name: state[name] for name in state if not any(map(name.count, copies))} for state in states)
    match = match_weights(own, found)
    if match.differences and not (partial and match.loaded):
        partly = "--init-partial, which leaves those as they are initialised; or " if match.loaded else ""
        problem = f"--init-from {path} does not fit the model:\n{format_differences(match.differences)}"
        raise RequestError(problem, remedy=f"{partly}the --model that the weights belong to")
    model.load_state_dict({name: found[source] for name, source in match.loaded.items()}, strict=False)
    for part, of in copies.items():
        for name in filter(lambda name: part in name, states[1]):
            states[1][name].copy_(states[1][name.replace(part, of)])
    return match


def read_initial_weights(path: Path) -> dict[str, Any]:
    """The state dict in a file (.pt, .pth, .bin, .safetensors), in its parts (*.index.json), or in a folder of these.

    RequestError: no such file, damaged, or no weights in it.
    """
    file = find_weight_file(path) if path.is_dir() else path
    if file is None:
        raise RequestError(f"--init-from {path}: this folder has no weights file, or several", remedy="name the file")
    refuse_special_file(file, "--init-from")
    return _read_parts(file) if file.name.endswith(".index.json") else _read_file(file)


def match_weights(own: Mapping[str, Any], found: Mapping[str, Any]) -> WeightMatch:
    """Pair the names of two state dicts: equal ones first, then those that are equal without a wrapper's prefix.

    Of tied parameters, which a model has under several names, a file needs one.
    """
    sources = _pair_names(own, found)
    loaded, initialised = {}, {}
    for name, value in own.items():
        if (source := sources.get(name)) is None:
            initialised[name] = f"{name} is missing"
        elif not is_lazy(value) and format_shape(found[source]) != format_shape(value):
            initialised[name] = f"{name} is {format_shape(found[source])}, the model has {format_shape(value)}"
        else:
            loaded[name] = source
    given = {_memory(own[name]): source for name, source in loaded.items() if _memory(own[name])}
    for name in [name for name in initialised if name not in sources and _memory(own[name]) in given]:
        loaded[name] = given[_memory(own[name])]
        del initialised[name]
    return WeightMatch(loaded, initialised, [name for name in found if name not in sources.values()])


def _pair_names(own: Iterable[str], found: Iterable[str]) -> dict[str, str]:
    """Name in the model → name in the file; a name that is not the only one of its kind has no pair."""
    pairs = {name: name for name in set(own) & set(found)}
    free, offered = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for groups, names in ((free, own), (offered, found)):
        for name in names:
            if name not in pairs:
                groups[_strip_prefixes(name)].append(name)
    for stem, same in free.items():
        if len(same) == len(offered[stem]) == 1:
            pairs[same[0]] = offered[stem][0]
    return pairs


def _strip_prefixes(name: str) -> str:
    """A parameter's name without what wrappers put before it, in whatever order they did, and peft inside of it."""
    for part in _OF_PEFT:
        name = name.replace(part, ".")
    while prefix := next((prefix for prefix in _PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


def _memory(value: Any) -> tuple[Any, ...] | None:
    """What tied parameters have in common; None of what has no memory of its own."""
    if not isinstance(value, Tensor) or is_lazy(value) or not value.data_ptr():
        return None
    return value.data_ptr(), value.shape, value.stride()


def _read_file(file: Path) -> dict[str, Any]:
    if checkpoint := _open_checkpoint(file):
        return dict(checkpoint.state("model")["model"])
    return _read_safetensors(file) if file.suffix == ".safetensors" else read_weights(file, "--init-from")


def _open_checkpoint(file: Path) -> Checkpoint | None:
    """The checkpoint in pieces of which a file is one, unless it is damaged; None of any other file."""
    folder = file.parent
    if not (file.name in ("state.pt", BEST) or is_piece(file.name)) or not (folder / MANIFEST).is_file():
        return None
    damage = find_damage(folder)
    manifest = {} if damage else read_manifest(folder)
    if file.name == BEST and not damage and compute_sha256(file) != manifest.get("best", {}).get("sha256"):
        damage = "does not match its checksum"
    if damage:
        raise RequestError(f"--init-from {file}: {damage}", remedy="another checkpoint of that run, or its best.pt")
    checkpoint = Checkpoint(folder, manifest)
    return checkpoint if checkpoint.in_pieces and file.name != BEST else None


def _read_safetensors(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise RequestError(f"--init-from {file}: there is no such file", remedy="check the path")
    try:
        return dict(safetensors.load_file(file))
    except (SafetensorError, OSError, ValueError) as error:
        problem = f"--init-from {file} is not a valid .safetensors file: {error}"
        raise RequestError(problem, remedy="copy the file again") from error


def _read_parts(index: Path) -> dict[str, Any]:
    """Weights in several files, as Hugging Face's *.index.json lists them."""
    try:
        places = dict(json.loads(read_small(index.resolve()))["weight_map"])
        files = sorted({str(file) for file in places.values()})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"--init-from {index}: not a list of weights ({type(error).__name__})"
        raise RequestError(problem, remedy="a file with a weight_map") from error
    if strange := [file for file in files if Path(file).name != file or file.endswith(".json")]:
        raise RequestError(f"--init-from {index} names {strange[0]!r}, which is not a file in the same folder")
    if gone := [file for file in files if not (index.parent / file).is_file()]:
        raise RequestError(f"--init-from {index}: {', '.join(gone)} is missing", remedy="copy all files that it lists")
    parts = {file: _read_file(index.parent / file) for file in files}
    if lost := [name for name, file in places.items() if name not in parts[file]]:
        raise RequestError(f"--init-from {index}: {lost[0]} is not in {places[lost[0]]}", remedy="copy both again")
    return {name: parts[file][name] for name, file in places.items()}


def _count_names(names: Iterable[str], separator: str = ", ") -> str:
    """'6 tensors: a, b, c, d, …'."""
    listed = list(names)
    more = ["…"] if len(listed) > _LISTED else []
    return f"{pluralize(len(listed), 'tensor')}: {separator.join([*listed[:_LISTED], *more])}" if listed else "none"
