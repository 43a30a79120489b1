"""What a round does to a run: signals while it trains, harm to its checkpoints between two launches, a full disk."""

import os
import random
import resource
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multigpu_cli.checkpoint.manifest import find_damage
from tests.chaos.job import Attempt, progress, worker

_FULL = 40  # steps without room: some checkpoints

_HARMS = (
    "truncate",
    "flip a bit of",
    "delete state.pt of",
    "delete manifest.json of",
    "delete a file of",
    "delete",
    "leave a draft beside",
)


@dataclass(frozen=True)
class Deed:
    """A signal, or a disk that fills up, at one moment of an attempt.

    Attributes:
        what: a signal's name, "full disk", or "no room": for the files of one rank alone, during some steps.
        rank: whom it hits; None is the launcher, or the only process.
        after: steps of this attempt; None counts from its launch instead.
        writing: then wait until a checkpoint is being written.
        seconds: later than that.
        moment: seconds until SIGCONT, after a SIGSTOP.
    """

    what: str
    rank: int | None = None
    after: int | None = 20
    seconds: float = 0.0
    moment: float = 0.0
    writing: bool = False

    def __str__(self) -> str:
        whom = "the launcher" if self.rank is None else f"rank {self.rank}"
        when = "start-up" if self.after is None else f"step {self.after} of the attempt"
        what = {"full disk": self.what, "no room": f"no room for {whom}"}.get(self.what, f"{self.what} to {whom}")
        moment = "amid the first checkpoint after" if self.writing else f"{self.seconds * 1000:.0f} ms into"
        return f"{what} {moment} {when}"

    def done(self, attempt: Attempt, run: Path, before: int) -> bool:
        """Wait for the moment, and do it; False where it could not be done.

        Args:
            before: attempts that the journal told of when this one began.
        """
        if self.after is not None:
            wanted = (before + 1, self.after)
            if not attempt.wait_for(lambda: progress(run) >= wanted):
                return False
        if self.writing and not attempt.wait_for(lambda: any(run.glob("checkpoints/.draft_*"))):
            return False
        time.sleep(self.seconds)
        if self.what == "full disk":
            fill(run.parent)
            return not attempt.over()
        if self.what == "no room":
            return self._leave_no_room(attempt, run, before)
        hit = attempt.send(signal.Signals[self.what], self.rank)
        if hit and self.moment:
            time.sleep(self.moment)
            hit = attempt.send(signal.SIGCONT, self.rank)
        return hit

    def _leave_no_room(self, attempt: Attempt, run: Path, before: int) -> bool:
        process = worker(attempt.mark, self.rank or 0)
        if process is None:
            return False
        with suppress(ProcessLookupError):
            soft, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
            resource.prlimit(process, resource.RLIMIT_FSIZE, (0, hard))
            attempt.wait_for(lambda: progress(run) >= (before + 1, (self.after or 0) + _FULL))
            resource.prlimit(process, resource.RLIMIT_FSIZE, (soft, hard))
            return True
        return False


@dataclass(frozen=True)
class Harm:
    """Damage done to a run folder while nobody trains; it spares the last whole checkpoint.

    Where there are checkpoints and none is whole, the run is refused: tests/run/test_beginning.py.

    Attributes:
        what: one of _HARMS.
        back: 0 is the newest checkpoint, 1 the one before.
        place: where in its bytes, from 0 to 1.
        bit: which one is flipped; never the sixth, which turns 1e-05 into 1E-05, the same number.
    """

    what: str
    back: int = 0
    place: float = 0.5
    bit: int = 0

    def __str__(self) -> str:
        return f"{self.what} the {('newest', 'second newest')[self.back]} checkpoint"

    def done(self, run: Path) -> tuple[bool, str | None]:
        """Whether it could be done, and the name of a checkpoint that must be passed over from now on."""
        found = checkpoints(run)
        if not found:
            return False, None
        folder = found[min(self.back, len(found) - 1)]
        if [each for each in found if find_damage(each) is None] == [folder] and self.what != "leave a draft beside":
            return True, None
        files = sorted(folder.iterdir())
        file = files[int(self.place * 1000) % len(files)]
        match self.what:
            case "truncate":
                os.truncate(file, int(file.stat().st_size * self.place))
            case "flip a bit of":
                content = bytearray(file.read_bytes())
                content[int(len(content) * self.place)] ^= 1 << self.bit
                file.write_bytes(content)
            case "delete a file of":  # in pieces, that of some rank
                file.unlink()
            case "delete":
                shutil.rmtree(folder)
                return True, None
            case "leave a draft beside":
                draft = folder.with_name(f".draft_{folder.name}")
                draft.mkdir()
                (draft / ".state.pt.draft").write_bytes(b"half of a state")
                (run / ".summary.json.draft").write_text("{")
                return True, None
            case _:
                (folder / self.what.split()[1]).unlink()
        return True, folder.name


def checkpoints(run: Path) -> list[Path]:
    """Newest first, sound or not."""
    return sorted((run / "checkpoints").glob("step_*"), reverse=True)


def fill(disk: Path) -> None:
    """Write until nothing more fits."""
    with open(disk / "filler", "wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def a_kill(dice: random.Random, workers: int) -> Deed:
    """A worker is gone from one moment to the next; now and then rank 0, just while it writes a checkpoint."""
    if dice.random() < 0.25:
        return Deed("SIGKILL", 0, dice.randrange(4, 35), writing=True)
    return Deed("SIGKILL", dice.randrange(workers), dice.randrange(4, 35), dice.uniform(0, 0.03))


def a_pause(dice: random.Random, workers: int) -> Deed:
    """A worker stands still for a while, as on a machine that swaps."""
    return Deed("SIGSTOP", dice.randrange(workers), dice.randrange(4, 35), 0.0, dice.uniform(0.2, 1.5))


def a_full_share(dice: random.Random, workers: int) -> Deed:
    """A worker other than rank 0, which writes the journal, can't write its rows for a while."""
    return Deed("no room", dice.randrange(1, workers), dice.randrange(4, 35))


def a_stop(dice: random.Random, workers: int) -> Deed:
    """A signal that asks the run to stop, to all of it or to one worker."""
    what = dice.choice(["SIGTERM", "SIGINT", "SIGUSR1"])
    whom = dice.randrange(workers) if workers > 1 and dice.random() < 0.5 else None
    return Deed(what, whom, dice.randrange(4, 35), dice.uniform(0, 0.03))


def an_early_end(dice: random.Random) -> Deed:
    """The launcher is ended before the training has begun."""
    return Deed(dice.choice(["SIGKILL", "SIGTERM", "SIGINT"]), None, None, dice.uniform(0.3, 5.0))


def some_harm(dice: random.Random) -> Harm:
    return Harm(dice.choice(_HARMS), dice.choice([0, 0, 1]), dice.uniform(0.01, 0.99), dice.randrange(5))
