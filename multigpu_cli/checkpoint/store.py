"""The checkpoints of one run: draft → manifest → rename; the newest few are kept, and only intact ones are used."""

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from multigpu_cli.checkpoint.files import (
    PIECE,
    Moved,
    compute_sha256,
    flush_folder,
    ignore_progress,
    publish,
    publish_stream,
)
from multigpu_cli.checkpoint.manifest import (
    BEST,
    EVALUATION,
    MANIFEST,
    FindDamage,
    find_damage,
    find_damaged_piece,
    find_quick_damage,
    list_checkpoint_folders,
    list_pieces,
    parse_step,
    read_manifest,
    sign_manifest,
)
from multigpu_cli.checkpoint.pieces import Pieces, State, deserialize, fill_outlines, write_state
from multigpu_cli.errors import RequestError


class BestWeights(NamedTuple):
    """The best weights of a run."""

    file: Path  # best.pt
    sha256: str  # the checksum of its expected content


def add_best(draft: Path, best: BestWeights, others: Sequence[Path], moved: Moved = ignore_progress) -> bool:
    """Put the best weights into a checkpoint that is being written; False if they no longer exist.

    They are a hard link to those of one of the others, newest first, or a copy: writing into best.pt changes none.
    """
    if _link_best(others[:1], best, draft):
        return True
    if best.file.is_file():  # new ones, which older checkpoints do not have either
        if _copy_file(best.file, draft / BEST, moved) == best.sha256:
            return True
        (draft / BEST).unlink()
    return _link_best(others[1:], best, draft)


def _link_best(others: Sequence[Path], best: BestWeights, draft: Path) -> bool:
    for other in others:
        # its manifest may be unreadable or of an older form, and the file system may have no hard links
        with suppress(OSError, ValueError, TypeError, KeyError):
            if read_manifest(other)["best"]["sha256"] == best.sha256:
                os.link(other / BEST, draft / BEST)
                return True
    return False


def _link_or_copy(source: Path, target: Path, moved: Moved) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system may have no hard links; a full disk fails in the copy too
        _copy_file(source, target, moved)


def find_file(files: Iterable[Path], sha256_wanted: str) -> Path | None:
    """The first of these files that has this checksum."""
    return next((file for file in files if file.is_file() and compute_sha256(file) == sha256_wanted), None)


def _copy_file(source: Path, target: Path, moved: Moved = ignore_progress) -> str:
    """Returns the SHA-256 of what was copied."""
    with source.open("rb") as opened:
        size = source.stat().st_size
        return str(publish_stream(target, lambda file: shutil.copyfileobj(opened, file, PIECE), size, moved)["sha256"])


def restore_file(files: Sequence[Path], sha256_wanted: str) -> bool:
    """Restore the first of these files to the content with this checksum, from any of them; False if none has it."""
    found = find_file(files, sha256_wanted)
    if found not in (None, files[0]):
        _copy_file(found, files[0])
    return found is not None


def read_best(checkpoint: Path, manifest: dict[str, Any], step: int) -> bytes | None:
    """The best weights that belong to a checkpoint, as the bytes of best.pt: from its folder, or from its run.

    Their step identifies them in older checkpoints, whose manifest has no checksum of them.
    """
    published = checkpoint.parents[1] / "best.pt"
    if "best" in manifest:
        found = find_file([checkpoint / BEST, published], manifest["best"]["sha256"])
        return None if found is None else found.read_bytes()
    content = published.read_bytes() if published.is_file() else b""
    try:
        return content if int(deserialize(content, "best.pt")["metrics"]["step"]) == step else None
    except (RequestError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, listed and verified."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def in_pieces(self) -> bool:
        """Whether the ranks' rows are in files of their own, so that a reader can take what it needs."""
        return bool(list_pieces(self.manifest))

    def outline(self) -> State:
        """What state.pt holds; tensors that are in pieces are on the meta device."""
        files = [self.folder / name for name in ("state.pt", EVALUATION) if name in self.manifest["files"]]
        return {k: v for file in files for k, v in deserialize(file.read_bytes(), str(file)).items()}

    def open_pieces(self) -> Pieces:
        return Pieces(self.folder, list_pieces(self.manifest))

    def state(self, *parts: str) -> State:
        """The saved state, or these parts of it; only tensors, whole, and plain values."""
        outline = self.outline()
        outline = {part: outline[part] for part in parts} if parts else outline
        return fill_outlines(outline, self.open_pieces().read)


class Peers(Protocol):
    """What the other ranks do for a checkpoint of which each writes its rows."""

    def add_pieces(self, draft: Path) -> dict[str, dict[str, Any]]:
        """Write this rank's rows, and wait for those of the others; returns size and SHA-256 of each file."""

    def complete_best(self, outline: State) -> State:
        """Return the best weights, in which an outline stands for each tensor that all ranks hold rows of."""

    def find_damaged_pieces(self) -> dict[str, str] | None:
        """What is wrong with pieces of old checkpoints, by the name of their folder; None if a rank did not answer."""

    def abandon(self) -> None:
        """Remove the draft, once no rank writes into it any more."""


class Store:
    """Writes and finds checkpoints in RUN/checkpoints, and keeps so many of the newest.

    `moved` is called after each chunk that is written, or read to verify an old checkpoint before it is removed.
    """

    def __init__(self, folder: Path, keep: int = 1, moved: Moved = ignore_progress) -> None:
        self.folder, self.keep, self.moved = folder, keep, moved
        self._saved_step = -1  # of the checkpoint that was saved last

    def save(
        self, step: int, state: State, facts: State, best: BestWeights | None = None, peers: Peers | None = None
    ) -> int:
        """Write one checkpoint, or raise an OSError; remove the oldest; returns the bytes of its state."""
        self.sweep(but=self._name_draft(step) if peers else None)  # there another rank may have begun
        draft, final = self.open_draft(step), self.folder / f"step_{step:08d}"
        try:
            listed = {"state.pt": write_state(draft / "state.pt", state, self.moved)}
            listed |= peers.add_pieces(draft) if peers else {}
            if final.exists():  # a resumed run saves this step again
                self._set_aside_damaged(final)
            self._publish(draft, final, {"step": step, "files": listed} | facts, best)
        except OSError:
            self.discard_draft(step)  # frees the space for the next one
            raise
        self._saved_step = step
        damaged = peers.find_damaged_pieces() if peers else None
        for old in self.list_old(step):
            if not self._set_aside_damaged(old, damaged):
                shutil.rmtree(old)
        return sum(file["size"] for file in listed.values())

    def add_evaluation(self, step: int, state: State, best: BestWeights | None = None) -> None:
        """Replace the checkpoint that was saved last by one with its files, these entries and best weights, or raise.

        Nothing happens if that of this step could not be saved.
        """
        if step != self._saved_step:
            return
        draft, final = self.open_draft(step), self.folder / f"step_{step:08d}"
        try:
            manifest = {key: value for key, value in read_manifest(final).items() if key not in ("best", "sha256")}
            for name in manifest["files"]:
                _link_or_copy(final / name, draft / name, self.moved)
            manifest["files"][EVALUATION] = write_state(draft / EVALUATION, state, self.moved)
            self._publish(draft, final, manifest, best)
        except OSError:
            self.discard_draft(step)
            raise

    def _publish(self, draft: Path, final: Path, manifest: dict[str, Any], best: BestWeights | None) -> None:
        """Complete a draft and rename it; it replaces a checkpoint of the same step, if one exists."""
        if best and add_best(draft, best, self.list_folders(), self.moved):
            # not among the listed files: the state is complete without it
            manifest = manifest | {"best": {"file": BEST, "sha256": best.sha256}}
        publish(draft / MANIFEST, sign_manifest(manifest), self.moved)
        if final.exists():
            final.rename(_name_earlier(final))  # a checkpoint of this step under that name too
        draft.rename(final)
        flush_folder(self.folder)
        if _name_earlier(final).exists():
            shutil.rmtree(_name_earlier(final))

    def open_draft(self, step: int, kind: str = "step") -> Path:
        """Create the folder where files of a step are written, which several ranks may do at the same time.

        `kind` is "step" for the files of a checkpoint, or "best" for each rank's rows of the best weights.
        """
        self.folder.mkdir(exist_ok=True)  # but not its parent: if that was removed, this run must not write there
        draft = self._name_draft(step, kind)
        draft.mkdir(exist_ok=True)
        return draft

    def discard_draft(self, step: int, kind: str = "step") -> None:
        shutil.rmtree(self._name_draft(step, kind), ignore_errors=True)

    def _name_draft(self, step: int, kind: str = "step") -> Path:
        return self.folder / f".draft_{kind}_{step:08d}"

    def list_old(self, step: int) -> list[Path]:
        """Return the checkpoints to delete once `step` is saved. Later steps are damaged ones, which are kept."""
        return [folder for folder in self.list_folders() if 0 <= parse_step(folder) < step][self.keep - 1 :]

    def _set_aside_damaged(self, folder: Path, damaged_pieces: dict[str, str] | None = None) -> bool:
        """Rename a checkpoint if it is damaged, so that it can be examined; others may have looked at its pieces."""
        damage = find_quick_damage(folder, self.moved) or (
            find_damaged_piece(folder, moved=self.moved) if damaged_pieces is None else damaged_pieces.get(folder.name)
        )
        if damage is not None:
            self._rename(folder, "damaged")
        return damage is not None

    def _rename(self, folder: Path, why: str) -> None:
        """Add a prefix, and a number where that name is taken."""
        free = (folder.with_name(f"{why}_{folder.name}{suffix}") for suffix in chain([""], map("_{}".format, count(2))))
        folder.rename(next(name for name in free if not name.exists()))

    def discard_after(self, step: int) -> None:
        """Rename the checkpoints after this step, which a run that restarts from an older one replaces."""
        for folder in self.list_folders():
            if parse_step(folder) > step:
                self._rename(folder, "replaced")

    def sweep(self, but: Path | None = None) -> None:
        """Remove the drafts of a killed run, but not this one, and checkpoints in whose place it had put others."""
        for draft in self.folder.glob(".draft_*"):
            if draft != but:
                shutil.rmtree(draft)
        for folder in self.list_folders():
            if _name_earlier(folder).exists():
                shutil.rmtree(_name_earlier(folder))

    def find_newest(self, find_damage: FindDamage = find_damage) -> tuple[Checkpoint | None, list[str]]:
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
        return list_checkpoint_folders(self.folder)


def _name_earlier(folder: Path) -> Path:
    """What a checkpoint is called while another of the same step takes its name."""
    return folder.with_name(f"{folder.name}_earlier")
