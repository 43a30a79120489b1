"""Brings a checkpoint back from the mirror of a run whose own folder lacks it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer

from multigpu_cli.checkpoint.files import Moved, ignore_progress
from multigpu_cli.checkpoint.manifest import list_checkpoint_folders
from multigpu_cli.checkpoint.run_folder import NoIntactCheckpoint, choose_resume_point
from multigpu_cli.config.resume_rules import merge_with_checkpoint
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError
from multigpu_cli.mirror.follower import read_state, write_state
from multigpu_cli.mirror.remote import DamagedMirror, Mirror, MirrorError

_SLOW = 10.0  # seconds until the user is told what the run waits for


def restore_from_mirror(
    config: Config,
    *,
    attempt: int,
    begun: Sequence[str],
    moved: Moved = ignore_progress,
    note: Callable[[str], None] = print,
) -> tuple[str, list[str]]:
    """Copy the newest checkpoint of --mirror into the run folder, if it is newer than those there; rank 0 calls it.

    A mirror that can't be reached does not keep a run from going on from its own folder. `attempt` and `begun` are as
    for `choose_resume_point`; `note` shows what is copied, and that there is no answer. Returns the run folder, if a
    checkpoint was copied there, else ""; and what was skipped because it is damaged.

    RequestError: the mirror can't be used by a run that has no checkpoint of its own, or holds another run, or breaks
    off while it sends a checkpoint that is newer: to go on without it would remove it there.
    """
    url = str(config.checkpoint.mirror)
    if not begun:
        check_mirror_is_new(config)
    try:
        start = choose_resume_point(config, attempt=attempt, begun=begun)
        folder, own = Path(start.folder), int(start.manifest["step"]) if start.manifest else None
    except NoIntactCheckpoint as error:
        folder, own = error.folder, None
    try:
        with _note_when_slow(url, note):
            mirror = Mirror(url)
            steps, owner = mirror.list_steps(), mirror.read_owner()
            if not owner:
                mirror.write_owner("")  # shows now, and not after hours, that it can be written to
    except MirrorError as error:
        if own is None:
            raise _unusable(error) from error
        return "", []  # the process beside the run will report it
    _check_owner(config, mirror, folder, owner if steps else "")
    newer = [step for step in steps if own is None or step > own]
    if config.checkpoint.resume in ("auto", "never") and newer:
        return _download_newest(mirror, newer, folder, own, config, moved, note)
    return "", []


@contextmanager
def _note_when_slow(url: str, note: Callable[[str], None]) -> Iterator[None]:
    timer = Timer(_SLOW, note, [f"--mirror {url}: no answer for {_SLOW:g} s; still waiting"])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_mirror_is_new(config: Config) -> None:
    """With --resume never, check that --mirror is there and holds no run, before a launcher chooses the run folder."""
    if config.checkpoint.resume != "never":
        return
    try:
        mirror = Mirror(str(config.checkpoint.mirror))
        steps = mirror.list_steps()
    except MirrorError as error:
        raise _unusable(error) from error
    if steps:
        problem = f"--resume never, but {mirror.url} already holds a run"
        raise RequestError(problem, remedy="use another --mirror, or --resume auto to continue that run")


def _unusable(error: MirrorError) -> RequestError:
    return RequestError(error.problem, remedy="check the URL, the credentials and the network, or leave out --mirror")


def _check_owner(config: Config, mirror: Mirror, folder: Path, owner: str) -> None:
    """Check that checkpoints in the mirror, if there are any, and so an owner, are those of this run."""
    known = read_state(folder).id
    has_own = bool(list_checkpoint_folders(folder / "checkpoints"))
    elsewhere = config.checkpoint.resume not in ("auto", "never")
    if owner and owner != known and (known or has_own or elsewhere):
        raise RequestError(
            f"--mirror {mirror.url}: holds the checkpoints of another run than {folder}",
            remedy="use another --mirror; a run resumes from its mirror with --resume auto and a --save-dir that is "
            "new or its own",
        )


def _download_newest(
    mirror: Mirror,
    steps: Sequence[int],
    folder: Path,
    own: int | None,
    config: Config,
    moved: Moved,
    note: Callable[[str], None],
) -> tuple[str, list[str]]:
    """Download the newest intact one of these checkpoints, with the run's other files; the folder's `own` is older.

    Returns the run folder, "" if none was intact; and what was skipped.
    """
    damages: list[str] = []
    for step in steps:
        try:
            if own is None:
                _check_settings(config, mirror, step)
            size = f"{mirror.measure_checkpoint(step) / 2**20:,.1f} MiB"
            note(f"copying step {step} ({size}) from {mirror.url} to {folder}")
            mirror.download_checkpoint(step, folder, moved)
            write_state(folder, replace(read_state(folder), id=mirror.read_owner()))
        except DamagedMirror as error:
            damages.append(f"skipped {error.problem}")
        except MirrorError as error:
            raise _unusable(error) from error
        except OSError as error:
            problem = f"--mirror {mirror.url}: step {step} could not be copied to {folder}: {error}"
            raise RequestError(problem, remedy="free some space, or use another --save-dir") from error
        else:
            return str(folder), damages
    if own is not None:
        return "", damages
    listed = "".join(f"\n  {damage}" for damage in damages)
    problem = f"--mirror {mirror.url}: has no intact checkpoint{listed}"
    raise RequestError(problem, remedy="start a new run with another --mirror and --save-dir")


def _check_settings(config: Config, mirror: Mirror, step: int) -> None:
    """Check that the run in the mirror is the one that the command describes, before anything is copied."""
    manifest = mirror.read_manifest(step)
    try:
        merge_with_checkpoint(config, manifest["settings"], manifest["written"], manifest["pins"], mirror.url)
    except RequestError as error:
        differing = "; ".join(line for line in error.problem.splitlines() if not line.startswith("  try: "))
        remedy = "a new run needs another --mirror; to resume that run, repeat its settings"
        raise RequestError(f"--mirror holds another run: {differing}", remedy=remedy) from error
