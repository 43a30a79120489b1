"""The checkpoints of one run: draft → manifest → rename; the newest few are kept, and only whole ones are used."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.files import flush_folder, packed, publish, unpacked

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, listed and verified."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    def state(self) -> dict[str, Any]:
        """What was saved; only tensors and plain values."""
        file = self.folder / "state.pt"
        return dict(unpacked(file.read_bytes(), str(file)))


class Store:
    """Writes and finds checkpoints in a folder.

    Args:
        folder: RUN/checkpoints.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def save(self, step: int, state: dict[str, Any], facts: dict[str, Any]) -> int:
        """Write one checkpoint and let the oldest go; returns its size in bytes.

        Args:
            facts: what goes into the manifest beside sizes and sums (pins, world size, versions).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sweep()
        draft, final = self.folder / f".draft_step_{step:08d}", self.folder / f"step_{step:08d}"
        draft.mkdir()
        content = packed(state)
        publish(draft / "state.pt", content)
        listed = {"state.pt": {"size": len(content), "sha256": sha256(content).hexdigest()}}
        publish(draft / MANIFEST, _signed({"step": step, "files": listed} | facts))
        if final.exists():  # the same step once more, after a resume from an older checkpoint
            self._remove(final)
        draft.rename(final)
        flush_folder(self.folder)
        upto = [folder for folder in self._folders() if folder.name <= final.name]  # beyond lie only damaged ones
        for old in upto[self.keep :]:
            self._remove(old)
        return len(content)

    def _remove(self, folder: Path) -> None:
        """Let a checkpoint go; a damaged one is evidence, and only steps aside."""
        if damage_in(folder) is None:
            shutil.rmtree(folder)
        else:
            self._put_aside(folder, "damaged")

    def _put_aside(self, folder: Path, why: str) -> None:
        free = (folder.with_name(f"{why}_{folder.name}{suffix}") for suffix in ("", *(f"_{n}" for n in range(2, 1000))))
        folder.rename(next(name for name in free if not name.exists()))

    def begin_after(self, step: int) -> None:
        """A run that begins again from an older checkpoint replaces what came later: put that aside."""
        for folder in self._folders():
            if int(folder.name.removeprefix("step_")) > step:
                self._put_aside(folder, "replaced")

    def sweep(self) -> None:
        """Remove what a killed run left half-written."""
        for draft in self.folder.glob(".draft_*"):
            shutil.rmtree(draft)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and why newer ones were passed over (they stay where they are)."""
        passed_over = []
        for folder in self._folders():
            if damage := damage_in(folder):
                passed_over.append(f"passed over {folder}: {damage}")
            else:
                return Checkpoint(folder, read_manifest(folder)), passed_over
        return None, passed_over

    def _folders(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("step_*"), reverse=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    return dict(json.loads((folder / MANIFEST).read_text()))


def _signed(manifest: dict[str, Any]) -> bytes:
    """As JSON, with a checksum over itself: one wrong digit among the settings would be another run."""
    return json.dumps(manifest | {"sha256": _sum(manifest)}, indent=1).encode()


def _sum(manifest: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(manifest))
    return sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def damage_in(folder: Path) -> str | None:
    """What is wrong with a checkpoint: a file that is missing, torn or changed since it was listed; None if whole."""
    return next(_damages(folder), None)


def _damages(folder: Path) -> Iterator[str]:
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError, TypeError) as error:
        yield f"{MANIFEST} can't be read ({type(error).__name__})"
        return
    if manifest.pop("sha256", None) != _sum(manifest):
        yield f"{MANIFEST} does not match its own checksum"
        return
    for name, listed in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != listed["size"]:
            yield f"{name} has {file.stat().st_size} bytes instead of {listed['size']}"
        elif sha256(file.read_bytes()).hexdigest() != listed["sha256"]:
            yield f"{name} does not match its checksum"
