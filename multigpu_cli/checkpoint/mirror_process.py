"""The process beside rank 0 that keeps the mirror of its run folder up to date, so that no step waits for a network.

Rank 0 holds the other end of its standard input: a byte there means that the run has ended, a closed end that it died.
This process then sends what is missing and ends. It loads no torch.
"""

import fcntl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from multigpu_cli.checkpoint.manifest import find_damage, list_checkpoint_folders, parse_step, read_manifest
from multigpu_cli.checkpoint.mirror import FINAL_FILES, SMALL_FILES, Mirror, MirrorError
from multigpu_cli.checkpoint.mirror_state import read_state, write_state

PATIENCE = 60.0  # seconds without progress, after the end of the run, until it gives up
_INTERVAL = 1.0  # seconds between looks at the run folder
_LONGEST_PAUSE = 30.0  # seconds between tries while the mirror refuses


class Follower:
    """Uploads each new checkpoint of a run, the newest first, and remembers in the run folder how far it came.

    Args:
        keep: how many of the newest checkpoints stay in the mirror.

    Attributes:
        progressed: time.monotonic of the last bytes that were read or sent.
    """

    def __init__(self, run: Path, mirror: Mirror, keep: int) -> None:
        self.run, self.mirror, self.keep = run, mirror, keep
        self.progressed = time.monotonic()
        self._state = read_state(run)
        self._claimed = False
        self._damaged: set[str] = set()

    def follow(self, ended: threading.Event, patience: float = PATIENCE) -> bool:
        """Keep the mirror up to date until the run has ended; whether all is there then."""
        pause = _INTERVAL
        while True:
            last = ended.wait(pause)
            try:
                self.upload_new()
                if last:
                    self.upload_final()
                    return True
                pause = _INTERVAL
            except (MirrorError, OSError) as error:
                self._record(error=str(error))
                pause = min(2 * pause, _LONGEST_PAUSE)
                if last and time.monotonic() - self.progressed > patience:
                    return False
                if last:
                    time.sleep(min(pause, patience / 10))

    def upload_new(self) -> None:
        """Upload the newest intact checkpoint, if the mirror lacks it, then remove the oldest there.

        Raises:
            MirrorError: the mirror can't be used, or belongs to another run.
            OSError: the run folder can't be read.
        """
        if not self._claimed:
            self._claim()
        new = next(filter(self._is_new, list_checkpoint_folders(self.run / "checkpoints")), None)
        if new is None:
            return
        try:
            manifest = read_manifest(new)
            self.mirror.upload_checkpoint(new, self._moved)
        except FileNotFoundError:  # the run has removed it meanwhile, as it does with old ones
            return
        for name in SMALL_FILES:
            self.mirror.upload_file(self.run / name)
        kept = self.mirror.list_steps()[: self.keep]
        self.mirror.discard(lambda step: step not in kept)
        self._record(step=parse_step(new), content=str(manifest["sha256"]))

    def upload_final(self) -> None:
        """Upload the weights for use, and the last lines of the journal."""
        for name in (*FINAL_FILES, *SMALL_FILES):
            self.mirror.upload_file(self.run / name)
            self._moved()
        self._record(complete=True)

    def _claim(self) -> None:
        """Take over the mirror for this run: the id is that of the run folder, else the mirror's, else a new one."""
        owner, steps = self.mirror.read_owner(), self.mirror.list_steps()
        own = self._state.id or owner or uuid4().hex
        newest = max(map(parse_step, list_checkpoint_folders(self.run / "checkpoints")), default=-1)
        if steps and (owner != own or newest < 0):
            raise MirrorError(f"mirror {self.mirror.url}: holds checkpoints of another run")
        if owner != own:
            self.mirror.write_owner(own)
        self.mirror.discard(lambda step: step > newest)  # of before the run was restarted from an older checkpoint
        known = self._state
        if known.url != self.mirror.url or (known.step or 0) > newest or known.step not in steps:
            known = replace(known, step=None, content="")
        self._state, self._claimed = known, True
        self._record(id=own, url=self.mirror.url, complete=False)

    def _is_new(self, folder: Path) -> bool:
        """Whether a checkpoint is to be sent: intact, and not older than the last that was, nor the same."""
        step, last = parse_step(folder), self._state.step
        if str(folder) in self._damaged or (last is not None and step < last):
            return False
        try:
            if last == step and read_manifest(folder)["sha256"] == self._state.content:
                return False
        except (OSError, ValueError, KeyError):
            pass  # `find_damage` says so below
        if find_damage(folder, self._moved):
            self._damaged.add(str(folder))  # the run reports it
            return False
        return True

    def _moved(self) -> None:
        self.progressed = time.monotonic()

    def _record(self, *, error: str = "", **changes: Any) -> None:
        self._state = replace(self._state, error=error, **changes)
        write_state(self.run, self._state)


@contextmanager
def lock_mirror(run: Path, how: int = 0) -> Iterator[None]:
    """Be the one process that sends this run; another may still send for an earlier attempt.

    Args:
        how: fcntl.LOCK_NB, not to wait for it.

    Raises:
        BlockingIOError: with LOCK_NB, another process is sending.
    """
    with open(run / ".mirror.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
        yield


def main(run: str, url: str, keep: str) -> int:
    """Mirror a run folder until its run has ended.

    Returns:
        the exit code: 1 if something is missing in the mirror.
    """
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read(1)
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    with lock_mirror(Path(run)):
        return 0 if Follower(Path(run), Mirror(url), int(keep)).follow(ended) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
