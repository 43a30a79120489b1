"""checkpoints and clean: what runs have on the disk, each file verified without loading it, and what of it can go."""

import pickletools
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from lzma import LZMAError
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from multigpu_cli.checkpoint.files import is_locked, lock_folder
from multigpu_cli.checkpoint.manifest import MANIFEST, find_damage, parse_step, read_manifest
from multigpu_cli.commands.status import find_runs
from multigpu_cli.config.regular_files import open_regular, refuse_links
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.monitor.format import format_bytes, format_duration
from multigpu_cli.monitor.history import load_summary

_PLAIN = re.compile(
    r"collections (OrderedDict|Counter)|_codecs encode|__builtin__ (set|bytearray|complex)|"
    r"torch\._utils _rebuild_\w+|torch (\w*Storage|Size|device|[a-z]+\d\w*|bool)"
)
_IMPORTS = ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4")  # torch.save writes only GLOBAL


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint, unfinished draft or file of weights."""

    name: str  # relative to the run folder
    state: str  # whole (intact), damaged, draft (unfinished) or aside (damaged or replaced, renamed by a later attempt)
    reason: str  # why it is not intact; "" if it is
    written: float  # Unix seconds
    bytes: int  # of all its files
    step: int | None = None  # of the manifest, as the next; None where there is none
    world_size: int | None = None
    resumes: bool = False  # a run would resume from this checkpoint


def list_checkpoints(run: Path) -> list[CheckpointEntry]:
    """Checkpoints of a run folder, oldest first, then drafts and renamed ones, then best.pt and last.pt."""
    if not any((run / name).exists() for name in ("config.yaml", "journal.jsonl", "checkpoints")):
        raise RequestError(f"{run} is not a run folder", remedy="name the --save-dir of a run")
    running = is_locked(run)
    found: list[CheckpointEntry] = []
    folders = [path for path in (run / "checkpoints").glob("*") if path.is_dir()]
    for folder in sorted(folders, key=lambda path: (not path.name.startswith("step_"), parse_step(path), path.name)):
        try:
            found.append(_checkpoint(folder, running=running))
        except FileNotFoundError:
            if not running:  # else the run has removed it in the meantime
                raise
    newest = max((at for at, entry in enumerate(found) if entry.state == "whole"), default=None)
    listing = [CheckpointEntry(**entry.__dict__ | {"resumes": at == newest}) for at, entry in enumerate(found)]
    return [*listing, *(_weights(run / name) for name in ("best.pt", "last.pt") if (run / name).exists())]


def _checkpoint(folder: Path, *, running: bool) -> CheckpointEntry:
    name = f"checkpoints/{folder.name}"
    files = [path for path in folder.rglob("*") if path.is_file()]
    dated = folder / MANIFEST if (folder / MANIFEST).exists() else folder
    written = dated.stat().st_mtime
    size = sum(path.stat().st_size for path in files)
    if folder.name.startswith(".draft_"):
        return CheckpointEntry(name, "draft", "being written" if running else "never finished", written, size)
    damage = find_damage(folder) or _find_fault(folder / "state.pt")
    if damage and not folder.exists():
        raise FileNotFoundError(folder)
    if not folder.name.startswith("step_"):
        why = folder.name.partition("_")[0]
        return CheckpointEntry(name, "aside", f"{why}: {damage}" if damage else why, written, size)
    if damage:
        return CheckpointEntry(name, "damaged", damage, written, size)
    manifest = read_manifest(folder)
    return CheckpointEntry(name, "whole", "", written, size, manifest["step"], manifest.get("world_size"))


def _weights(path: Path) -> CheckpointEntry:
    """best.pt or last.pt: there is no manifest, but torch.save's archive has a checksum for each of its parts."""
    about = path.stat()
    damage = _find_fault(path)
    return CheckpointEntry(path.name, "damaged" if damage else "whole", damage, about.st_mtime, about.st_size)


def _find_fault(path: Path) -> str:
    """What is wrong with a file of torch.save: gone, truncated, modified, or more than tensors and plain values."""
    try:
        with open_regular(path) as file, ZipFile(file) as archive:
            if torn := archive.testzip():
                return f"{path.name} does not match its checksum ({torn})"
            pickles = [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
            codes = chain.from_iterable(map(pickletools.genops, pickles))
            wanted = [str(arg or code.name) for code, arg, _ in codes if code.name in _IMPORTS]
    except (BadZipFile, zlib.error, LZMAError, ValueError, EOFError, IndexError, OSError, RuntimeError) as error:
        return f"{path.name} is not a torch.save file ({type(error).__name__})"
    strange = (name.replace(" ", ".") for name in wanted if not _PLAIN.fullmatch(name))
    return next((f"{path.name} would run {name} when loaded" for name in strange), "")


def format_checkpoints(run: str, entries: list[CheckpointEntry]) -> Iterator[str]:
    """One line each."""
    width = max((len(entry.name) for entry in entries), default=0)
    now = time.time()
    for entry in entries:
        workers = "" if entry.world_size is None else pluralize(entry.world_size, "worker")
        verdict = ": ".join(filter(None, (entry.state, entry.reason)))
        if entry.resumes:
            verdict = "valid; a run resumes from here"
        size, age = format_bytes(entry.bytes), format_duration(max(0.0, now - entry.written))
        yield f"{entry.name:<{width}}  {size:>11}  {age:>12} ago  {workers:<10}  {verdict}"
    if not any(entry.resumes for entry in entries):
        yield f"{run} has no checkpoint to resume from"


@dataclass(frozen=True)
class Cleaning:
    """The checkpoints of a run that can be, or were, removed, oldest first; otherwise the reason to keep them."""

    run: str
    checkpoints: list[Path]
    bytes: int
    reason: str = ""
    removed: bool = False


def clean_runs(names: Sequence[str], *, remove: bool) -> list[Cleaning]:
    """List the checkpoints of each run that can be removed, and remove them if requested."""
    return clean_folders(find_runs(names), _find_obstacle, remove=remove)


def clean_folders(runs: Sequence[Path], find_obstacle: Callable[[Path], str], *, remove: bool) -> list[Cleaning]:
    """Like `clean_runs`, for run folders; `find_obstacle` returns why the checkpoints of one must stay, or ""."""
    found = [inspect_run(run, find_obstacle) for run in runs]
    for each in found if remove else ():
        refuse_links(Path(each.run))
    return [_remove(each, find_obstacle) if remove and each.checkpoints else each for each in found]


def inspect_run(run: Path, find_obstacle: Callable[[Path], str]) -> Cleaning:
    """Return the checkpoints of a run that can be removed: none if it is running, or there is an obstacle."""
    if reason := "at work" if is_locked(run) else find_obstacle(run):
        return Cleaning(str(run), [], 0, reason)
    folders = [
        path
        for path in sorted((run / "checkpoints").glob("step_*"))
        # that the store made: another folder beside the checkpoints is the user's
        if re.fullmatch(r"step_\d{8}", path.name) and not path.is_symlink() and (path / MANIFEST).is_file()
    ]
    files = [path.lstat() for folder in folders for path in folder.rglob("*") if not path.is_dir()]
    once = {(file.st_dev, file.st_ino): file.st_size for file in files}  # those that several checkpoints share
    return Cleaning(str(run), folders, sum(once.values()))


def format_cleaning(found: Sequence[Cleaning]) -> Iterator[str]:
    """A line for each run, and the sum."""
    width = max(len(each.run) for each in found)
    for each in found:
        text = f"left alone: {each.reason}" if each.reason else _describe(len(each.checkpoints), each.bytes)
        yield f"{each.run:<{width}}  {text}"
    affected = [each for each in found if each.checkpoints]
    total = _describe(sum(len(each.checkpoints) for each in affected), sum(each.bytes for each in affected))
    of = f"{total} of {pluralize(len(affected), 'run')}"
    if not affected:
        yield "there is nothing to remove"
    elif all(each.removed for each in affected):
        yield f"removed: {of}; best.pt and last.pt stay"
    else:
        yield f"nothing was removed; --yes removes {of}, and leaves best.pt and last.pt"


def _find_obstacle(run: Path) -> str:
    """Return why the checkpoints of a run must stay, "" if they can be removed."""
    if load_summary(run).get("status") != "completed":
        return "not completed: its checkpoints are needed to resume"
    lost = "best.pt is missing or damaged, and its checkpoints may hold the best weights"
    return lost if _find_fault(run / "best.pt") else ""


def _remove(found: Cleaning, find_obstacle: Callable[[Path], str]) -> Cleaning:
    """Remove the checkpoints while holding the folder's lock; skip a run that has started in the meantime."""
    run = Path(found.run)
    try:
        with lock_folder(run):
            if reason := find_obstacle(run):
                return Cleaning(found.run, [], 0, reason)
            for folder in found.checkpoints:
                shutil.rmtree(folder)
    except OSError as error:
        raise RequestError(f"{run}: {error}", remedy="change its permissions, and run clean again") from error
    return replace(found, removed=True)


def _describe(checkpoints: int, size: int) -> str:
    return f"{pluralize(checkpoints, 'checkpoint')}, {format_bytes(size)}"
