"""Lists the checkpoints and weights of a run folder and verifies each without loading it; without torch."""

import pickletools
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from multigpu_cli.checkpoint.files import is_locked
from multigpu_cli.checkpoint.manifest import MANIFEST, find_damage, parse_step, read_manifest
from multigpu_cli.errors import RequestError

_PLAIN = re.compile(
    r"collections (OrderedDict|Counter)|_codecs encode|__builtin__ (set|bytearray|complex)|"
    r"torch\._utils _rebuild_\w+|torch (\w*Storage|Size|device|[a-z]+\d\w*|bool)"
)


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint, unfinished draft or file of weights."""

    name: str  # relative to the run folder
    state: str  # whole (intact), damaged, draft (unfinished) or aside (damaged or replaced, renamed by a later attempt)
    reason: str  # why it is not intact, "" where it is
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
    damage = find_damage(folder) or next(_not_plain(folder / "state.pt"), None)
    if damage and not folder.exists():
        raise FileNotFoundError(folder)
    if not folder.name.startswith("step_"):
        why = folder.name.partition("_")[0]
        return CheckpointEntry(name, "aside", f"{why}: {damage}" if damage else why, written, size)
    if damage:
        return CheckpointEntry(name, "damaged", damage, written, size)
    manifest = read_manifest(folder)
    return CheckpointEntry(name, "whole", "", written, size, int(manifest["step"]), int(manifest["world_size"]))


def _weights(path: Path) -> CheckpointEntry:
    """best.pt or last.pt: there is no manifest, but torch.save's archive has a checksum for each of its parts."""
    about = path.stat()
    damage = next(_not_plain(path), None)
    return CheckpointEntry(path.name, "damaged" if damage else "whole", damage or "", about.st_mtime, about.st_size)


def _not_plain(path: Path) -> Iterator[str]:
    """What is wrong with a file of torch.save: truncated, modified, or naming more than tensors and plain values."""
    try:
        with zipfile.ZipFile(path) as archive:
            if torn := archive.testzip():
                yield f"{path.name} does not match its checksum ({torn})"
                return
            pickles = [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
            wanted = [
                str(arg or code.name)
                for text in pickles
                for code, arg, _ in pickletools.genops(text)
                if code.name in _IMPORTS
            ]
    except (zipfile.BadZipFile, ValueError, EOFError, IndexError, RuntimeError) as error:
        yield f"{path.name} is not a torch.save file ({type(error).__name__})"
        return
    yield from (
        f"{path.name} would run {name.replace(' ', '.')} when loaded" for name in wanted if not _PLAIN.fullmatch(name)
    )


_IMPORTS = ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4")  # torch.save writes only GLOBAL
