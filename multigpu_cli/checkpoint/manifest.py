"""The manifest of a checkpoint, and the check whether its files are intact; without torch."""

import json
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.files import Moved, compute_sha256, ignore_progress
from multigpu_cli.config.regular_files import read_small
from multigpu_cli.errors import make_line
from multigpu_cli.monitor.journal import check_fields

MANIFEST = "manifest.json"
BEST = "best_weights.pt"  # the best weights so far, in a checkpoint's folder; the manifest names their sum under "best"

EVALUATION = "evaluation.pt"  # the entries of state.pt that the evaluation after it has changed

_DEEPEST = 100  # levels of settings, which recursive code walks; YAML allows half of them
_MOST = 1_000_000  # values of settings, of which a vocabulary is the longest part

FindDamage = Callable[[Path], str | None]  # what is wrong with a checkpoint; None if nothing is


def parse_step(folder: Path) -> int:
    """The step in the name of a checkpoint's folder; -1 if there is none."""
    number = re.match(r"step_(\d+)", folder.name)
    return int(number[1]) if number else -1


def list_checkpoint_folders(home: Path) -> list[Path]:
    """All checkpoints in RUN/checkpoints, intact or not, newest first; of one step the one that replaces another."""
    return sorted(home.glob("step_*"), key=lambda folder: (parse_step(folder), -len(folder.name)), reverse=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, not verified."""
    return dict(json.loads(read_small(folder / MANIFEST)))


def sign_manifest(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON with a checksum over itself, so that a flipped digit in a setting is detected."""
    return json.dumps(manifest | {"sha256": _sum(manifest)}, indent=1).encode()


def _sum(manifest: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(manifest))
    return sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def check_extent(settings: object) -> None:
    """Raise ValueError unless settings have at most 100 levels and 1,000,000 values.

    Code that looks for a value walks all of them. In a file of weights a list may contain itself, or ten times a list
    that contains ten times another one: a few bytes for any number of values.
    """
    waiting, count = [(settings, 0)], 0
    while waiting:  # not recursive, because the depth is what it checks
        value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} levels deep")
        inner: list[object] = []
        if isinstance(value, Mapping):
            inner = [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            inner = list(value)
        count += len(inner)
        if count > _MOST:
            raise ValueError(f"more than {_MOST:,} values")
        waiting += [(each, depth + 1) for each in inner]


def list_pieces(manifest: dict[str, Any]) -> list[str]:
    """The files of a checkpoint that hold the rows of one rank each; none where state.pt has everything."""
    return [name for name in manifest["files"] if is_piece(name)]


def is_piece(name: str) -> bool:
    """Whether a file of a checkpoint holds the rows of one rank, by its name."""
    return re.fullmatch(r"rank_\d+\.safetensors", name) is not None


def find_damage(folder: Path, moved: Moved = ignore_progress) -> str | None:
    """What is wrong with a checkpoint: a file that is missing, truncated or modified; None if it is intact."""
    return find_quick_damage(folder, moved) or find_damaged_piece(folder, moved=moved)


def find_quick_damage(folder: Path, moved: Moved = ignore_progress) -> str | None:
    """What is wrong with a checkpoint as far as one rank can tell quickly: the content of pieces is not read."""
    if damage := find_manifest_damage(folder):
        return damage
    manifest = read_manifest(folder)
    pieces = list_pieces(manifest)
    for name, listed in manifest["files"].items():
        file = folder / name
        if Path(name).name != name:
            return f"{MANIFEST} lists {make_line(name)}, which is not a file of its folder"
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != listed["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {listed['size']}"
        if name not in pieces and compute_sha256(file, moved) != listed["sha256"]:
            return f"{name} does not match its checksum"
    return None


def find_manifest_damage(folder: Path) -> str | None:
    """What is wrong with the manifest of a checkpoint alone; no other file is looked at."""
    try:
        manifest = read_manifest(folder)
        if manifest.get("sha256") != _sum({name: value for name, value in manifest.items() if name != "sha256"}):
            return f"{MANIFEST} does not match its own checksum"
        check_fields(manifest, MANIFEST)
        check_extent(manifest)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} can't be read ({type(error).__name__})"
    return None


def find_damaged_piece(folder: Path, share: int = 0, shares: int = 1, *, moved: Moved = ignore_progress) -> str | None:
    """Whether a piece of a checkpoint was modified; of `shares` readers this one, number `share`, looks at some."""
    manifest = read_manifest(folder)
    for name in list_pieces(manifest)[share::shares]:
        try:
            intact = compute_sha256(folder / name, moved) == manifest["files"][name]["sha256"]
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"
        if not intact:
            return f"{name} does not match its checksum"
    return None
