"""The manifest of a checkpoint, and the check whether its files are intact; without torch."""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.files import Moved, compute_sha256, ignore_progress

MANIFEST = "manifest.json"


def parse_step(folder: Path) -> int:
    """The step in the name of a checkpoint's folder; -1 if there is none."""
    number = re.match(r"step_(\d+)", folder.name)
    return int(number[1]) if number else -1


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, not verified."""
    return dict(json.loads((folder / MANIFEST).read_text()))


def sign_manifest(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON with a checksum over itself, so that a flipped digit in a setting is detected."""
    return json.dumps(manifest | {"sha256": _sum(manifest)}, indent=1).encode()


def _sum(manifest: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(manifest))
    return sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def find_damage(folder: Path, moved: Moved = ignore_progress) -> str | None:
    """What is wrong with a checkpoint: a file that is missing, truncated or modified; None if it is intact.

    Args:
        moved: called after each chunk is read.
    """
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError, TypeError) as error:
        return f"{MANIFEST} can't be read ({type(error).__name__})"
    if manifest.pop("sha256", None) != _sum(manifest):
        return f"{MANIFEST} does not match its own checksum"
    for name, listed in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != listed["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {listed['size']}"
        if compute_sha256(file, moved) != listed["sha256"]:
            return f"{name} does not match its checksum"
    return None
