"""Brings a checkpoint back from the mirror of a run whose own folder lacks it."""

from collections.abc import Sequence
from pathlib import Path

from multigpu_cli.checkpoint.manifest import list_checkpoint_folders
from multigpu_cli.checkpoint.mirror import FINAL_FILES, SMALL_FILES, Mirror, MirrorError
from multigpu_cli.checkpoint.mirror_state import read_state
from multigpu_cli.checkpoint.run_folder import NoIntactCheckpoint, choose_resume_point
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError


def restore_from_mirror(config: Config, *, attempt: int, begun: Sequence[str]) -> None:
    """Copy the newest checkpoint of --mirror into the run folder, if it is newer than those there; rank 0 calls it.

    A mirror that can't be reached does not keep a run from going on from its own folder.

    Args:
        attempt: as for `choose_resume_point`.
        begun: likewise.

    Raises:
        RequestError: the mirror can't be used by a run that has no checkpoint of its own, or holds another run.
    """
    if config.checkpoint.mirror is None:
        return
    if not begun:
        check_mirror_is_new(config)
    mirror = Mirror(config.checkpoint.mirror)
    try:
        start = choose_resume_point(config, attempt=attempt, begun=begun)
        folder, own = Path(start.folder), int(start.manifest["step"]) if start.manifest else None
    except NoIntactCheckpoint as error:
        folder, own = error.folder, None
    try:
        steps, owner = mirror.list_steps(), mirror.read_owner()
        if not owner:
            mirror.write_owner("")  # shows now, and not after hours, that it can be written to
    except MirrorError as error:
        if own is None:
            raise _unusable(error) from error
        return  # the process beside the run will report it
    _check_owner(config, mirror, folder, owner if steps else "")
    if config.checkpoint.resume in ("auto", "never") and steps and steps[0] > (-1 if own is None else own):
        _download_newest(mirror, steps, folder, own)


def check_mirror_is_new(config: Config) -> None:
    """With --resume never, check that --mirror holds no run, before a launcher chooses the run folder.

    Raises:
        RequestError: it holds one, or can't be reached.
    """
    if config.checkpoint.mirror is None or config.checkpoint.resume != "never":
        return
    mirror = Mirror(config.checkpoint.mirror)
    try:
        steps = mirror.list_steps()
    except MirrorError as error:
        raise _unusable(error) from error
    if steps:
        raise RequestError(
            f"--resume never, but {mirror.url} already holds a run",
            remedy="use another --mirror, or --resume auto to continue that run",
        )


def _unusable(error: MirrorError) -> RequestError:
    return RequestError(error.problem, remedy="check the URL, the credentials and the network, or leave out --mirror")


def _check_owner(config: Config, mirror: Mirror, folder: Path, owner: str) -> None:
    """Check that checkpoints in the mirror are those of this run.

    Args:
        owner: id of the run that has checkpoints in the mirror; "" where there are none.
    """
    known = read_state(folder).id
    has_own = bool(list_checkpoint_folders(folder / "checkpoints"))
    elsewhere = config.checkpoint.resume not in ("auto", "never")
    if owner and owner != known and (known or has_own or elsewhere):
        raise RequestError(
            f"--mirror {mirror.url}: holds the checkpoints of another run than {folder}",
            remedy="use another --mirror; a run goes on from its mirror with --resume auto and a --save-dir that is "
            "new or its own",
        )


def _download_newest(mirror: Mirror, steps: Sequence[int], folder: Path, own: int | None) -> None:
    """Download the newest checkpoint that is intact and newer than the run folder's own, with the run's other files."""
    damages = []
    for step in steps:
        if own is not None and step <= own:
            return
        try:
            mirror.download_checkpoint(step, folder)
        except MirrorError as error:
            damages.append(f"\n  {error.problem}")
            continue
        except OSError as error:
            raise RequestError(
                f"--mirror {mirror.url}: step {step} could not be copied to {folder}: {error}",
                remedy="free some space, or use another --save-dir",
            ) from error
        for name in (*SMALL_FILES, *FINAL_FILES):
            mirror.download_file(name, folder)
        return
    raise RequestError(
        f"--mirror {mirror.url}: has no intact checkpoint{''.join(damages)}",
        remedy="start a new run with another --mirror and --save-dir",
    )
