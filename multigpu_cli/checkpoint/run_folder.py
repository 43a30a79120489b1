"""The run folder: which one a command means, where the run resumes, and the folder's small files."""

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from multigpu_cli.capabilities import BEFORE_LAUNCH, load_given
from multigpu_cli.checkpoint.files import is_locked, locked_error, publish, still_locked_error, wait_until_unlocked
from multigpu_cli.checkpoint.manifest import (
    MANIFEST,
    FindDamage,
    find_manifest_damage,
    find_quick_damage,
    read_manifest,
)
from multigpu_cli.checkpoint.store import Checkpoint, Store
from multigpu_cli.config.paths import BEGAN, read_rewind_checkpoint
from multigpu_cli.config.regular_files import read_small, refuse_links
from multigpu_cli.config.resume_rules import is_same_run
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.monitor.journal import read_json

_NOTE = "next_attempt.json"
_PATIENCE = 20.0  # seconds for a process of the previous attempt to end, on a node that lost its network


@dataclass(frozen=True)
class ResumePoint:
    """Where a run begins, as plain values that rank 0 can broadcast."""

    folder: str  # the run folder; it may not exist yet
    checkpoint: str | None  # the checkpoint folder to resume from, or None
    manifest: dict[str, Any] | None  # the manifest of that checkpoint
    summary: dict[str, Any] | None  # summary.json of the previous attempt in the folder, or None
    warnings: list[str]  # the checkpoints that were skipped, with reasons
    reason: str  # the reason for the choice, which the plan shows
    rewind_from: str | None = None  # the older checkpoint of the same folder that --resume names, or None
    micro_batch_after_oom: int | None = None  # to start with, if memory ran out before the first checkpoint
    global_batch: int | None = None  # the global batch of that attempt, which does not change
    eval_batch_after_oom: int | None = None  # most samples, if memory ran out in a sharded evaluation
    checkpoint_rank: int = 0  # the rank whose disk has the checkpoint


class CheckpointNotFound(RequestError):
    """This node has no checkpoint to resume from."""


class NoIntactCheckpoint(CheckpointNotFound):
    """All checkpoints in the run folder are damaged; a new run in it would overwrite the best weights."""

    folder: Path  # the run folder


def resume_exists(resume: str) -> bool:
    """Whether --resume names a run folder or a checkpoint on this node, intact or not."""
    return (Path(resume) / MANIFEST).is_file() or bool(Store(Path(resume) / "checkpoints").list_folders())


def choose_resume_point(
    config: Config,
    *,
    attempt: int,  # how often the launcher has restarted this process
    begun: Sequence[str] = (),  # run folders of earlier attempts of this launch; only these are continued
    elsewhere: bool = False,  # another node has the checkpoint that --resume names
    find_damage: FindDamage = find_quick_damage,  # what to look at; as it is, the content of pieces is not
) -> ResumePoint:
    """Choose the run folder and the checkpoint to resume from; nothing is written.

    RequestError: --resume names no checkpoint, or is "never" for a folder that holds a run; another run is using the
    folder; or none of its checkpoints is intact. TrainingError: an earlier attempt of this run still uses the folder.
    """
    save_dir, resume = config.checkpoint.save_dir, config.checkpoint.resume
    if resume not in ("auto", "never"):
        return _from_path(Path(resume), save_dir, attempt, find_damage, elsewhere=elsewhere)
    if save_dir is not None:
        folder = Path(save_dir)
        _check_folder(folder)
        if resume == "never" and holds_run(folder) and str(folder) not in begun:
            problem = f"--resume never, but {folder} already holds a run"
            raise RequestError(problem, remedy="use another --save-dir, or --resume auto to continue that run")
        return _in_folder(folder, attempt, find_damage)
    home = Path("checkpoints") / re.sub(r"[^\w.-]+", "-", config.recipe or config.data.name)
    if ours := next((run for run in begun if Path(run).parent == home), None):
        return _in_folder(Path(ours), attempt, find_damage)
    look = cache(find_damage)  # gigabytes are read once
    if resume == "auto" and (unfinished := _newest_unfinished(home, config, look)):
        return _in_folder(unfinished, attempt, look)
    run_id = time.strftime("%Y%m%d-%H%M%S-") + uuid4().hex[:4]
    return ResumePoint(str(home / run_id), None, None, None, [], "a new run")


def resolve_folder(config: Config) -> Config:
    """The config with its run folder resolved and checked, for processes that a launcher starts, and may restart."""
    for check in load_given(BEFORE_LAUNCH, config):
        check(config)
    folder, resume = choose_resume_point(config, attempt=0).folder, config.checkpoint.resume
    checkpoint = replace(config.checkpoint, save_dir=folder, resume="auto" if resume == "never" else resume)
    return replace(config, checkpoint=checkpoint, explicit=config.explicit | {"save_dir", "resume"})


def holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists()


def read_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json of a run, or None if it can't be read; save_dir is the folder's present path, also of a copy."""
    found = read_json(folder / "summary.json", "summary.json")
    return found | {"save_dir": str(folder)} if "save_dir" in found else found or None


def _in_folder(folder: Path, attempt: int, find_damage: FindDamage) -> ResumePoint:
    refuse_links(folder)
    # waits first, since the other process may still replace the checkpoints
    if not wait_until_unlocked(folder, patience=_PATIENCE if attempt else 0):
        raise still_locked_error(folder) if attempt else locked_error(folder)
    newest, notes = Store(folder / "checkpoints").find_newest(find_damage)
    if newest is None and notes:
        raise _no_intact_error(folder, [note.removeprefix("skipped ") for note in notes])
    if newest is None and (read_summary(folder) or {}).get("status") == "completed":
        problem = f"{folder} is complete, and its checkpoints were removed: it can't be resumed"
        remedy = f"use another --save-dir; --init-from {folder / 'best.pt'} starts from its best weights"
        raise RequestError(problem, remedy=remedy)
    if newest is None:
        reason = "a new run" if not holds_run(folder) else "from the beginning: the folder has no checkpoint"
        return ResumePoint(str(folder), None, None, None, notes, reason)
    return _resume_from(folder, newest, read_summary(folder), notes)


def _no_intact_error(folder: Path, damages: Sequence[str]) -> NoIntactCheckpoint:
    best = folder / "best.pt"
    listed = "".join(f"\n  {damage}" for damage in damages)
    restart = "start a new run with --resume never and another --save-dir"
    restart += f" (from the best weights of this one: --init-from {best})" if best.is_file() else ""
    error = NoIntactCheckpoint(
        f"{folder} has {pluralize(len(damages), 'checkpoint')}, and none is intact{listed}",
        remedy=f"{restart}; or use --resume PATH of an intact checkpoint, with another --save-dir",
    )
    error.folder = folder
    return error


def _resume_from(folder: Path, found: Checkpoint, summary: dict[str, Any] | None, notes: list[str]) -> ResumePoint:
    reason = f"resumes from step {found.step} ({found.folder})"
    return ResumePoint(str(folder), str(found.folder), found.manifest, summary, notes, reason)


def _from_path(
    path: Path, save_dir: str | None, attempt: int, find_damage: FindDamage, *, elsewhere: bool
) -> ResumePoint:
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    folder = Path(save_dir) if save_dir else run
    refuse_links(folder)
    own_step = not save_dir or path.parent.resolve() == (folder / "checkpoints").resolve()
    if own_step and read_rewind_checkpoint(folder) == path.name:
        return _in_folder(folder, attempt, find_damage)  # the command was repeated
    if not elsewhere and not resume_exists(str(path)):
        raise _not_found_error(path, [])
    if save_dir and not path.resolve().is_relative_to(folder.resolve()):
        own = _in_folder(folder, attempt, find_damage)
        if own.checkpoint:  # the command was repeated after a stop: resume the new run, not PATH once more
            return own
    if (path / MANIFEST).is_file():
        if damage := find_damage(path):
            problem = f"--resume {path}: {damage}"
            raise RequestError(problem, remedy="name an older checkpoint of that run, or its run folder")
        start = _resume_from(folder, Checkpoint(path, read_manifest(path)), None, [])
        return replace(start, rewind_from=str(path)) if own_step else start
    newest, notes = Store(path / "checkpoints").find_newest(find_damage)
    if newest is None:
        raise _not_found_error(path, notes)
    return _resume_from(folder, newest, read_summary(folder) if folder == path else None, notes)


def _not_found_error(path: Path, notes: Sequence[str]) -> CheckpointNotFound:
    run = next((str(folder) for folder in path.parents if holds_run(folder)), "")
    problem = f"--resume {path}: contains no checkpoint" + "".join(f"\n  {note}" for note in notes)
    remedy = f"--resume {run}" if run else "name a run folder, or one of its checkpoints/step_… folders"
    return CheckpointNotFound(problem, remedy=remedy)


def rewind_run(start: ResumePoint, store: Store) -> None:
    """Discard the later checkpoints of a run that restarts from an older one, and record that this was done."""
    if start.rewind_from and start.manifest:
        store.discard_after(int(start.manifest["step"]))
        publish(Path(start.folder) / BEGAN, Path(start.rewind_from).name.encode())


def _newest_unfinished(home: Path, config: Config, find_damage: FindDamage) -> Path | None:
    """The newest run of the same configuration that has a checkpoint, has not completed and is not running now."""
    runs = sorted((path for path in home.glob("*") if holds_run(path)), key=lambda path: path.stat().st_mtime)
    for folder in reversed(runs):
        if is_locked(folder) or (read_summary(folder) or {}).get("status") == "completed":
            continue
        for look in (find_manifest_damage, find_damage):  # only what is meant is read whole
            newest, _ = Store(folder / "checkpoints").find_newest(look)
            if newest is None or not is_same_run(config, newest.manifest["settings"]):
                break
        else:
            return folder
    return None


def _check_folder(folder: Path) -> None:
    """Check that --save-dir can be created and written to."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise RequestError(f"--save-dir {folder}: {nearest} is a file", remedy="name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RequestError(f"--save-dir {folder}: no permission to write in {nearest}", remedy="use another --save-dir")


def write_note(folder: Path, settings: dict[str, Any]) -> None:
    """Store settings that the next attempt must use instead of the last checkpoint's."""
    publish(folder / _NOTE, json.dumps(settings).encode())


def read_note(folder: Path) -> dict[str, Any]:
    """The settings that an earlier attempt stored, or an empty dict."""
    try:
        return dict(json.loads(read_small(folder / _NOTE)))
    except FileNotFoundError:
        return {}


def write_summary(folder: Path, text: str) -> None:
    publish(folder / "summary.json", (text + "\n").encode())
