"""Files and folders that settings name: whether they are there and of the right kind, before torch is loaded."""

import os
from collections.abc import Iterator
from pathlib import Path

from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, did_you_mean


def broken(config: Config) -> Iterator[RequestError]:
    """The paths that cannot be what they are given for."""
    if config.data.dir is not None:
        yield from _data_dir(config.data.dir, own=":" in config.data.name)
    if config.model.init_from is not None:
        yield from _init_from(Path(config.model.init_from))
    if config.checkpoint.save_dir is not None:
        yield from _save_dir(config.checkpoint.save_dir)
    if config.checkpoint.resume not in ("auto", "never") and not Path(config.checkpoint.resume).exists():
        yield RequestError(
            f"--resume {config.checkpoint.resume}: there is no such run folder or checkpoint",
            remedy=_near(Path(config.checkpoint.resume), ("auto", "never"))
            or "auto, never, or the path of a run folder",
        )


def _data_dir(given: str, *, own: bool) -> Iterator[RequestError]:
    path = Path(given)
    if not path.exists():
        yield RequestError(
            f"--data-dir {given}: there is no such folder", remedy=_near(path) or f"from {Path.cwd()} the path is wrong"
        )
    elif not path.is_dir() and not own:
        yield RequestError(
            f"--data-dir {given}: is a file, not a folder", remedy="the folder that holds the unpacked data"
        )
    elif not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        yield RequestError(f"--data-dir {given}: cannot be read", remedy="check its permissions")


def _init_from(path: Path) -> Iterator[RequestError]:
    if path.is_dir():
        best = path / "best.pt"
        yield RequestError(
            f"--init-from {path}: is a folder, not a file of weights",
            remedy=f"--init-from {best}" if best.exists() else "name the file, for instance best.pt of a run folder",
        )
    elif not path.exists():
        yield RequestError(f"--init-from {path}: there is no such file", remedy=_near(path) or "check the path")
    elif not os.access(path, os.R_OK):
        yield RequestError(f"--init-from {path}: cannot be read", remedy="check its permissions")


def _save_dir(given: str) -> Iterator[RequestError]:
    there = next(folder for folder in (Path(given), *Path(given).absolute().parents) if folder.exists())
    if not there.is_dir():
        inside = "" if there == Path(given) else f": {there}"
        yield RequestError(f"--save-dir {given}{inside} is a file, not a folder", remedy="another --save-dir")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield RequestError(
            f"--save-dir {given}: {there} cannot be written to", remedy="another --save-dir, or its permissions"
        )


def _near(path: Path, words: tuple[str, ...] = ()) -> str:
    """A name close to the missing one, among the words and what lies in its folder; empty where nothing is close."""
    names = list(words)
    if path.parent.is_dir() and os.access(path.parent, os.R_OK):
        names += [str(path.parent / entry.name) for entry in path.parent.iterdir()]
    hint = did_you_mean(str(path), names) if names else ""
    return hint if hint.startswith("did you mean") else ""
