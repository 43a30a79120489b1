"""mirror: sends a run's newest checkpoint and its weights to a remote folder, after a run that could not."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.lock import is_locked
from multigpu_cli.checkpoint.manifest import list_checkpoint_folders
from multigpu_cli.checkpoint.mirror import Mirror, MirrorError
from multigpu_cli.checkpoint.mirror_process import Follower, lock_mirror
from multigpu_cli.checkpoint.mirror_state import read_state
from multigpu_cli.checkpoint.run_folder import holds_run
from multigpu_cli.config.mirror_url import find_url_errors
from multigpu_cli.config.paths import refuse_links
from multigpu_cli.errors import RequestError, TrainingError, combine_errors

_PATIENCE = 10.0  # seconds for which the command tries again what fails
_KEEP = 10**6  # nothing is removed there


def mirror_run(run: str, url: str) -> dict[str, Any]:
    """Send what the remote folder lacks; returns the URL and the step of its newest checkpoint.

    Raises:
        RequestError: there is no such run, it is at work or has a link in it, or the URL is wrong.
        TrainingError: the remote folder refused it.
    """
    folder = Path(run)
    if errors := list(find_url_errors(url, "--to")):
        raise combine_errors(errors)
    if not holds_run(folder):
        raise RequestError(f"{run}: is no run folder", remedy="name the folder that holds its config.yaml")
    refuse_links(folder)
    if not list_checkpoint_folders(folder / "checkpoints"):
        raise RequestError(f"{run}: has no checkpoint to send", remedy="train it until its first one")
    if is_locked(folder):
        raise RequestError(f"{run}: the run is at work", remedy="wait for its end; with --mirror it sends them itself")
    ended = threading.Event()
    ended.set()
    try:
        with lock_mirror(folder, lambda busy: True):
            complete = Follower(folder, _open(url), _KEEP).follow(ended, _PATIENCE)
    except BlockingIOError as error:
        raise RequestError(f"{run}: {error}", remedy="wait for its end, or end it if it hangs") from error
    if not complete:
        raise TrainingError(read_state(folder).error, remedy="the same command once the remote folder is back")
    return {"url": read_state(folder).url, "step": read_state(folder).step}


def _open(url: str) -> Mirror:
    try:
        return Mirror(url)
    except MirrorError as error:
        raise RequestError(error.problem, remedy="check the URL and the credentials") from error


def format_mirrored(found: dict[str, Any]) -> Iterator[str]:
    """What the remote folder holds now."""
    yield f"{found['url']} holds the checkpoint of step {found['step']} and the run's files, read back and compared"
