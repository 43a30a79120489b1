"""Checks the files and folders that settings name, before torch is loaded."""

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from multigpu_cli.config.mirror_url import find_url_errors
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError

BEGAN = ".began_from"  # file in a run folder: the name of its older checkpoint that --resume restarted it from

_WEIGHT_FILES = ("best.pt", "state.pt", "*.index.json", "*.safetensors", "pytorch_model.bin")
_USUAL = ("model", "pytorch_model")  # of Hugging Face's, where a folder has several


class UnsafeFolder(RequestError):
    """A run folder has a symbolic link in it."""


def refuse_links(run: Path) -> None:
    """Check that nothing in a run folder is a symbolic link, before anything in it is written or removed.

    The folder itself may be one, and W&B's own links stay, which lead to its other files beside them.

    Raises:
        UnsafeFolder: names the link: what is done to the file would be done to another, somewhere else.
    """
    of_wandb = run / "loggers" / "wandb"
    for place, folders, files in os.walk(run):
        for path in (Path(place, name) for name in (*folders, *files)):
            if not path.is_symlink():
                continue
            inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(of_wandb))
            if not (inside and of_wandb in path.parents):
                raise UnsafeFolder(
                    f"{path} is a symbolic link: nothing in a run folder is written or removed through one",
                    remedy="replace it by what it leads to, or remove it; the run folder itself may be a link",
                )


def read_rewind_checkpoint(run: Path) -> str | None:
    """The name of the older checkpoint that a run was restarted from, which may have been removed since; or None."""
    try:
        return (run / BEGAN).read_text()
    except OSError:
        return None


def find_path_errors(config: Config) -> Iterator[RequestError]:
    """One error per path that is missing, of the wrong kind or not accessible."""
    if config.model.init_from is not None:
        yield from _init_from(Path(config.model.init_from))
    if config.log.prompts is not None:
        yield from _prompts(Path(config.log.prompts))
    if config.checkpoint.mirror is not None:
        yield from find_url_errors(config.checkpoint.mirror)
    if config.checkpoint.save_dir is not None:
        yield from _save_dir(config.checkpoint.save_dir)
    if config.checkpoint.resume not in ("auto", "never"):
        yield from _resume(Path(config.checkpoint.resume))


def _prompts(path: Path) -> Iterator[RequestError]:
    if path.suffix not in (".jsonl", ".txt"):
        yield RequestError(
            f"--prompts {path}: must end in .jsonl or .txt", remedy="a .txt file with a prompt in each line"
        )
    elif not path.is_file():
        near = suggest_path(path, folders=False)
        yield RequestError(
            f"--prompts {path}: there is no such file", remedy=near or "a .jsonl or .txt file of prompts"
        )


def _init_from(path: Path) -> Iterator[RequestError]:
    if path.is_dir():
        if find_weight_file(path) is None:
            yield RequestError(
                f"--init-from {path}: is a folder without weights, or with several",
                remedy="name the file, for instance best.pt of a run folder",
            )
    elif not path.exists():
        if near := suggest_path(path, folders=False):
            yield RequestError(f"--init-from {path}: there is no such file", remedy=near)
        else:
            yield RequestError(
                f"--init-from {path}: there is no such file or folder, and nothing is downloaded",
                remedy="the path of what you have downloaded: its folder, or the model.safetensors in it",
            )
    elif not path.is_file():
        yield RequestError(f"--init-from {path}: is not a regular file", remedy="name the best.pt of a run folder")
    elif not os.access(path, os.R_OK):
        yield RequestError(f"--init-from {path}: cannot be read", remedy="check its permissions")


def find_weight_file(folder: Path) -> Path | None:
    """The file of weights in a folder: of a run, of a checkpoint, or as Hugging Face lays them out.

    None where there is none, or where there are several of a kind and none has the usual name.
    """
    for pattern in _WEIGHT_FILES:
        found = sorted(folder.glob(pattern))
        usual = found if len(found) < 2 else [file for file in found if file.name.partition(".")[0] in _USUAL]
        if found:
            return usual[0] if len(usual) == 1 else None
    return None


def _resume(path: Path) -> Iterator[RequestError]:
    if not path.exists() and read_rewind_checkpoint(path.parent.parent) != path.name:
        remedy = suggest_path(path, ("auto", "never")) or "use auto, never, or the path of a run folder"
        yield RequestError(f"--resume {path}: there is no such run folder or checkpoint", remedy=remedy)


def _save_dir(given: str) -> Iterator[RequestError]:
    for folder in (path := Path(given).absolute(), *path.parents):
        if folder.name in ("checkpoints", "logs", "tensorboard") and (folder.parent / "journal.jsonl").exists():
            yield RequestError(
                f"--save-dir {given}: is inside the folder of another run, {folder}",
                remedy=f"use --save-dir {folder.parent}",
            )
            return
    try:
        refuse_links(Path(given))
    except UnsafeFolder as error:
        yield error
    there = next(folder for folder in (Path(given), *Path(given).absolute().parents) if folder.exists())
    if not there.is_dir():
        inside = "" if there == Path(given) else f": {there}"
        yield RequestError(f"--save-dir {given}{inside} is a file, not a folder", remedy="use another --save-dir")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield RequestError(
            f"--save-dir {given}: no permission to write in {there}",
            remedy="use another --save-dir, or change the permissions",
        )


def suggest_path(path: Path, words: tuple[str, ...] = (), *, folders: bool = True) -> str:
    """A question with the closest match to a missing path among `words` and its neighbor folders (or files); or ""."""
    names = {word: word for word in words}
    if path.parent.is_dir() and os.access(path.parent, os.R_OK | os.X_OK):
        there = [entry for entry in path.parent.iterdir() if entry.is_dir() == folders and entry.name[0] != "."]
        names |= {entry.name: str(path.parent / entry.name) for entry in there}
    close = get_close_matches(path.name, names, n=1)
    return f"did you mean {names[close[0]]!r}?" if close else ""
