"""The checkpoints of one run: draft → manifest → rename; the newest few are kept, and only whole ones are used."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.best import BEST, BestWeights, add_best
from multigpu_cli.checkpoint.files import Moved, flush_folder, nothing, publish, publish_by
from multigpu_cli.checkpoint.manifest import MANIFEST, damage_in, read_manifest, signed, step_in
from multigpu_cli.checkpoint.serialize import pack, tensor_bytes, unpacked


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
        moved: called for each piece that is written, or read again before an old checkpoint goes.
    """

    def __init__(self, folder: Path, keep: int, moved: Moved = nothing) -> None:
        self.folder, self.keep, self._moved = folder, keep, moved

    def save(self, step: int, state: dict[str, Any], facts: dict[str, Any], best: BestWeights | None = None) -> int:
        """Write one checkpoint and let the oldest go; returns the size of its state in bytes.

        Args:
            facts: what goes into the manifest beside sizes and sums (pins, world size, versions).
            best: the best weights so far, which stay with it.

        Raises:
            OSError: it could not be written; the others are as they were.
        """
        self.folder.mkdir(exist_ok=True)  # but not its parent: if that has gone, so has the right to write there
        self.sweep()
        draft, final = self.folder / f".draft_step_{step:08d}", self.folder / f"step_{step:08d}"
        try:
            draft.mkdir()
            size, total = _write(draft / "state.pt", state, self._moved)
            listed = {"state.pt": {"size": size, "sha256": total}}
            if best and add_best(draft, best, self.folders(), self._moved):  # not listed: the state is whole without it
                facts = facts | {"best": {"file": BEST, "sha256": best.sha256}}
            publish(draft / MANIFEST, signed({"step": step, "files": listed} | facts), self._moved)
            if final.exists():  # the same step once more, after a resume from an older checkpoint
                self._remove(final)
            draft.rename(final)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)  # it takes the room that the next one needs
            raise
        flush_folder(self.folder)
        upto = [folder for folder in self.folders() if 0 <= step_in(folder) <= step]  # beyond lie only damaged ones
        for old in upto[self.keep :]:
            self._remove(old)
        return size

    def _remove(self, folder: Path) -> None:
        """Let a checkpoint go; a damaged one is evidence, and only steps aside."""
        if damage_in(folder, self._moved) is None:
            shutil.rmtree(folder)
        else:
            self._put_aside(folder, "damaged")

    def _put_aside(self, folder: Path, why: str) -> None:
        free = (folder.with_name(f"{why}_{folder.name}{suffix}") for suffix in ("", *(f"_{n}" for n in range(2, 1000))))
        folder.rename(next(name for name in free if not name.exists()))

    def begin_after(self, step: int) -> None:
        """A run that begins again from an older checkpoint replaces what came later: put that aside."""
        for folder in self.folders():
            if step_in(folder) > step:
                self._put_aside(folder, "replaced")

    def sweep(self) -> None:
        """Remove what a killed run left half-written."""
        for draft in self.folder.glob(".draft_*"):
            shutil.rmtree(draft)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and why newer ones were passed over (they stay where they are)."""
        passed_over = []
        for folder in self.folders():
            if damage := damage_in(folder):
                passed_over.append(f"passed over {folder}: {damage}")
            else:
                return Checkpoint(folder, read_manifest(folder)), passed_over
        return None, passed_over

    def folders(self) -> list[Path]:
        """All checkpoints, whole or not, newest first."""
        return sorted(self.folder.glob("step_*"), key=step_in, reverse=True)


def _write(file: Path, state: dict[str, Any], moved: Moved) -> tuple[int, str]:
    """Size and SHA-256 of the file that was written."""
    told: list[tuple[int, str]] = []
    publish_by(file, lambda draft: told.append(pack(state, draft)), tensor_bytes(state), moved)
    return told[0]
