"""The checkpoints of one run: draft → manifest → rename; the newest few are kept, and only intact ones are used."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.best import BEST, BestWeights, add_best
from multigpu_cli.checkpoint.files import Moved, flush_folder, ignore_progress, publish, publish_stream
from multigpu_cli.checkpoint.manifest import MANIFEST, find_damage, parse_step, read_manifest, sign_manifest
from multigpu_cli.checkpoint.serialize import count_tensor_bytes, deserialize, serialize_to_file


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, listed and verified."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    def state(self) -> dict[str, Any]:
        """The saved state; only tensors and plain values."""
        file = self.folder / "state.pt"
        return dict(deserialize(file.read_bytes(), str(file)))


class Store:
    """Writes and finds checkpoints in a folder.

    Args:
        folder: RUN/checkpoints.
        keep: how many of the newest are kept.
        moved: called after each chunk that is written, or read to verify an old checkpoint before it is removed.
    """

    def __init__(self, folder: Path, keep: int, moved: Moved = ignore_progress) -> None:
        self.folder, self.keep, self._moved = folder, keep, moved

    def save(self, step: int, state: dict[str, Any], facts: dict[str, Any], best: BestWeights | None = None) -> int:
        """Write one checkpoint and remove the oldest; returns the size of its state in bytes.

        Args:
            facts: further entries of the manifest (pins, world size, versions).
            best: the best weights so far, which are stored with it.

        Raises:
            OSError: it could not be written; the other checkpoints are unchanged.
        """
        self.folder.mkdir(exist_ok=True)  # but not its parent: if that was removed, this run must not write there
        self.sweep()
        draft, final = self.folder / f".draft_step_{step:08d}", self.folder / f"step_{step:08d}"
        try:
            draft.mkdir()
            size, total = _write(draft / "state.pt", state, self._moved)
            listed = {"state.pt": {"size": size, "sha256": total}}
            if best and add_best(draft, best, self.list_folders(), self._moved):
                # not among the listed files: the state is complete without it
                facts = facts | {"best": {"file": BEST, "sha256": best.sha256}}
            publish(draft / MANIFEST, sign_manifest({"step": step, "files": listed} | facts), self._moved)
            if final.exists():  # the same step once more, after a resume from an older checkpoint
                self._remove(final)
            draft.rename(final)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)  # frees the space for the next one
            raise
        flush_folder(self.folder)
        past = [folder for folder in self.list_folders() if 0 <= parse_step(folder) <= step]  # later ones are damaged
        for old in past[self.keep :]:
            self._remove(old)
        return size

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint; a damaged one is only renamed, so that it can be examined."""
        if find_damage(folder, self._moved) is None:
            shutil.rmtree(folder)
        else:
            self._rename(folder, "damaged")

    def _rename(self, folder: Path, why: str) -> None:
        """Add a prefix, and a number where that name is taken."""
        free = (folder.with_name(f"{why}_{folder.name}{suffix}") for suffix in ("", *(f"_{n}" for n in range(2, 1000))))
        folder.rename(next(name for name in free if not name.exists()))

    def discard_after(self, step: int) -> None:
        """Rename the checkpoints after this step, which a run that restarts from an older one replaces."""
        for folder in self.list_folders():
            if parse_step(folder) > step:
                self._rename(folder, "replaced")

    def sweep(self) -> None:
        """Remove the drafts of a killed run."""
        for draft in self.folder.glob(".draft_*"):
            shutil.rmtree(draft)

    def find_newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest intact checkpoint, and why newer ones were skipped (they are left in place)."""
        skipped = []
        for folder in self.list_folders():
            if damage := find_damage(folder):
                skipped.append(f"skipped {folder}: {damage}")
            else:
                return Checkpoint(folder, read_manifest(folder)), skipped
        return None, skipped

    def list_folders(self) -> list[Path]:
        """All checkpoints, intact or not, newest first."""
        return sorted(self.folder.glob("step_*"), key=parse_step, reverse=True)


def _write(file: Path, state: dict[str, Any], moved: Moved) -> tuple[int, str]:
    """Write a state; returns size and SHA-256 of the file."""
    results: list[tuple[int, str]] = []
    publish_stream(
        file, lambda draft: results.append(serialize_to_file(state, draft)), count_tensor_bytes(state), moved
    )
    return results[0]
