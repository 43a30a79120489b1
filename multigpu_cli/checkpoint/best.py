"""Stores the best weights so far in each checkpoint's folder, since best.pt may be of a later step."""

import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.checkpoint.files import Moved, ignore_progress, publish
from multigpu_cli.checkpoint.manifest import BEST, read_manifest
from multigpu_cli.checkpoint.serialize import deserialize
from multigpu_cli.errors import RequestError


class BestWeights(NamedTuple):
    """The best weights of a run.

    Attributes:
        file: best.pt.
        sha256: the checksum of its expected content.
    """

    file: Path
    sha256: str


def add_best(draft: Path, best: BestWeights, others: Iterable[Path], moved: Moved = ignore_progress) -> bool:
    """Put the best weights into a checkpoint that is being written; False if they no longer exist.

    They are a hard link to those of another checkpoint, or a copy, so that writing into best.pt does not change them.

    Args:
        others: checkpoints that may contain the same weights.
        moved: called after each chunk is written to disk.

    Raises:
        OSError: the disk has no space for a copy.
    """
    for other in others:
        if _read_sum(other) == best.sha256 and _try_hard_link(other / BEST, draft / BEST):
            return True
    content = find_content([best.file], best.sha256)
    if content is not None:
        publish(draft / BEST, content, moved)
    return content is not None


def find_content(files: Iterable[Path], sha256_wanted: str) -> bytes | None:
    """The content of the first of these files that has this checksum; None if none has."""
    contents = (file.read_bytes() for file in files if file.is_file())
    return next((content for content in contents if sha256(content).hexdigest() == sha256_wanted), None)


def restore_file(files: Sequence[Path], sha256_wanted: str) -> bool:
    """Restore the first of these files to the content with this checksum, from any of them; False if none has it."""
    content = find_content(files, sha256_wanted)
    if content is not None and find_content(files[:1], sha256_wanted) is None:
        publish(files[0], content)
    return content is not None


def read_best(checkpoint: Path, manifest: dict[str, Any], step: int) -> bytes | None:
    """The best weights that belong to a checkpoint, as the bytes of best.pt: from its folder, or from its run.

    Args:
        step: of their evaluation; identifies them in older checkpoints, whose manifest has no checksum of them.
    """
    published = checkpoint.parents[1] / "best.pt"
    if "best" in manifest:
        return find_content([checkpoint / BEST, published], manifest["best"]["sha256"])
    content = published.read_bytes() if published.is_file() else b""
    return content if _read_step(content) == step else None


def _read_sum(checkpoint: Path) -> str | None:
    """The checksum of the best weights in a checkpoint's manifest; None if it has none."""
    try:
        return str(read_manifest(checkpoint)["best"]["sha256"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _try_hard_link(there: Path, here: Path) -> bool:
    """Create a hard link; False where the file system does not support it."""
    try:
        os.link(there, here)
    except OSError:
        return False
    return True


def _read_step(content: bytes) -> int | None:
    """The step at which the weights in a best.pt were evaluated; None if the content is not a best.pt."""
    try:
        found = deserialize(content, "best.pt")
        return int(found["metrics"]["step"])
    except (RequestError, KeyError, TypeError):
        return None
