"""The process beside rank 0 that keeps the mirror of its run folder up to date, so that no step waits for a network.

When the run has ended, or rank 0 is gone, it sends what is missing and ends. It loads no torch.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from multigpu_cli.checkpoint.files import publish, take_lock
from multigpu_cli.checkpoint.manifest import find_damage, list_checkpoint_folders, parse_step, read_manifest
from multigpu_cli.config.regular_files import NotRegularFile, without_links
from multigpu_cli.distributed.processes import serve
from multigpu_cli.mirror.remote import FINAL_FILES, SMALL_FILES, Mirror, MirrorError
from multigpu_cli.monitor.journal import read_json

PATIENCE = 60.0  # seconds between the first failure after the end of the run and the last try
_LOCK = ".mirror.lock"
_INTERVAL = 1.0  # seconds between looks at the run folder
_LONGEST_PAUSE = 30.0  # seconds between tries while the mirror refuses


class Follower:
    """Uploads each new checkpoint of a run, the newest first, keeps so many there, and notes how far it is.

    `note` takes a line to rank 0; "" says that it is at work.
    """

    def __init__(self, run: Path, mirror: Mirror, keep: int, note: Callable[[str], None] = lambda text: None) -> None:
        self.run, self.mirror, self.keep, self._note = run, mirror, keep, note
        self._state = read_state(run)
        if self._state.url != mirror.url:
            self._state = replace(self._state, url=mirror.url, step=None, content="")
        self._claimed = False
        self._damaged: set[str] = set()

    def follow(self, ended: threading.Event, patience: float = PATIENCE) -> bool:
        """Keep the mirror up to date until the run has ended, then try for so long what fails; whether all arrived."""
        pause, failed_at = _INTERVAL, inf
        with suppress(OSError):  # as below
            self._record(complete=False)
        while True:
            last = ended.wait(pause)
            self._note("")
            try:
                self.upload_new()
                if last:
                    for name in (*FINAL_FILES, *SMALL_FILES):  # weights for use, and the journal's last lines
                        self.mirror.upload_file(self.run / name, self._say_at_work)
                    self._record(complete=True)
                    return True
                pause = _INTERVAL
            except (MirrorError, OSError) as error:
                self._note(str(error))
                with suppress(OSError):  # the local disk may be full, until the run makes room
                    self._record(error=str(error))
                pause = min(2 * pause, _LONGEST_PAUSE)
                if last:
                    # no wait turns a link or a FIFO in the run folder into a file
                    failed_at = -inf if isinstance(error, NotRegularFile) else min(failed_at, time.monotonic())
                    if time.monotonic() - failed_at > patience:
                        return False
                    time.sleep(min(pause, patience / 10))

    def upload_new(self) -> None:
        """Upload the newest intact checkpoint, if the mirror lacks it, then remove the oldest there.

        MirrorError: the mirror can't be used, or belongs to another run. OSError: the run folder can't be read.
        """
        if not self._claimed:
            self._claim()
        new = next(filter(self._is_new, list_checkpoint_folders(self.run / "checkpoints")), None)
        if new is None:
            return
        if self.mirror.read_owner() != self._state.id:  # another run began with the same mirror
            raise MirrorError(f"mirror {self.mirror.url}: holds checkpoints of another run")
        try:
            manifest = read_manifest(new)
            self.mirror.upload_checkpoint(new, self._say_at_work)
        except FileNotFoundError:  # the run has removed it meanwhile, as it does with old ones
            return
        for name in SMALL_FILES:
            self.mirror.upload_file(self.run / name, self._say_at_work)
        kept = self.mirror.list_steps()[: self.keep]
        self.mirror.discard(lambda step: step not in kept)
        self._record(step=parse_step(new), content=str(manifest["sha256"]))

    def _claim(self) -> None:
        """Take over the mirror for this run; a checkpoint that came from there has brought its id."""
        owner, steps = self.mirror.read_owner(), self.mirror.list_steps()
        own = self._state.id or uuid4().hex
        newest = max(map(parse_step, list_checkpoint_folders(self.run / "checkpoints")), default=-1)
        if steps and (owner not in ("", own) or newest < 0):
            raise MirrorError(f"mirror {self.mirror.url}: holds checkpoints of another run")
        if owner != own:
            self.mirror.write_owner(own)
        self.mirror.discard(lambda step: step > newest)  # of before the run was restarted from an older checkpoint
        known = self._state
        if (known.step or 0) > newest or known.step not in steps:
            known = replace(known, step=None, content="")
        self._state, self._claimed = known, True
        self._record(id=own)

    def _is_new(self, folder: Path) -> bool:
        """Whether a checkpoint is to be sent: intact, and not older than the last that was, nor the same."""
        step, last = parse_step(folder), self._state.step
        if str(folder) in self._damaged or (last is not None and step < last):
            return False
        try:
            if last == step and read_manifest(folder)["sha256"] == self._state.content:
                return False
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # `find_damage` says so below
        if find_damage(folder, self._say_at_work):
            self._damaged.add(str(folder))  # the run reports it
            return False
        return True

    def _say_at_work(self) -> None:
        self._note("")

    def _record(self, *, error: str = "", **changes: Any) -> None:
        self._state = replace(self._state, error=error, **changes)
        write_state(self.run, self._state)


@contextmanager
def lock_mirror(run: Path, is_over: Callable[[str], bool] = lambda busy: False) -> Iterator[None]:
    """Be the one process that sends this run; wait for another, as that of a killed attempt, until `is_over`.

    That gets what names the other, which says by the file's time that it is at work; so does the BlockingIOError then.
    """
    with open(run / _LOCK, "a+", opener=without_links) as lock:

        def busy() -> str:
            lock.seek(0)
            return f"process {lock.read()} still sends this run"

        if not take_lock(lock, lambda: is_over(busy())):
            raise BlockingIOError(busy())
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {os.uname().nodename}")
        lock.flush()
        yield


def main(arguments: Sequence[str]) -> NoReturn:
    """Mirror a run folder (folder, URL, how many are kept, seconds that a process may hang) until its run has ended.

    It exits with 1 if something is missing in the mirror.
    """
    run, url, keep, hangs = Path(arguments[0]), arguments[1], int(arguments[2]), float(arguments[3])
    ended, note = serve()
    seen, since = 0, time.monotonic()

    def say_at_work(text: str) -> None:
        with suppress(OSError):
            os.utime(run / _LOCK, follow_symlinks=False)
        note(text)

    def is_over(busy: str) -> bool:
        nonlocal seen, since
        if (moved := (run / _LOCK).stat().st_mtime_ns) != seen:
            seen, since = moved, time.monotonic()
            note(busy)
        return ended.is_set() and time.monotonic() - since > hangs

    try:
        with lock_mirror(run, is_over):
            sys.exit(0 if Follower(run, Mirror(url), keep, say_at_work).follow(ended) else 1)
    except BlockingIOError as error:
        note(f"{error}, and has not moved for {hangs:.0f} s")
        sys.exit(1)
    except OSError as error:  # the lock failed: the folder was removed, or its lock is not a regular file
        note(str(error))
        sys.exit(1)


STATE_FILE = "mirror.json"


@dataclass(frozen=True)
class MirrorState:
    """What mirror.json holds."""

    id: str = ""  # of the run, which its mirror holds too; "" before the first contact
    url: str = ""  # of the mirror
    step: int | None = None  # of the newest checkpoint in the mirror
    content: str = ""  # checksum of that checkpoint's manifest
    complete: bool = False  # the mirror holds all files of the ended run
    error: str = ""  # why the last try failed; "" after one that did not


def read_state(run: Path) -> MirrorState:
    """Return the state of a run folder's mirror; an empty state if mirror.json is missing."""
    found = read_json(run / STATE_FILE, STATE_FILE)
    return MirrorState(**{name: found[name] for name in found.keys() & asdict(MirrorState())})


def write_state(run: Path, state: MirrorState) -> None:
    publish(run / STATE_FILE, json.dumps(asdict(state), indent=1).encode())


def explain_missing(run: Path, url: str, reason: str) -> str:
    """What the mirror of a run lacks, why, and what sends it; the run folder has all of it."""
    state = read_state(run)
    newest = next(map(parse_step, list_checkpoint_folders(run / "checkpoints")), None)
    sent = state.step if state.url == url else None
    lacks = "the last files of the run" if newest is None or newest == sent else f"the checkpoint of step {newest}"
    return f"{url} lacks {lacks} ({reason}); {run} has all of it; multigpu mirror {run} --to {url} sends it"
