"""Rounds: drawn from a seed, one act a launch, and played for real."""

import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from multigpu_cli.checkpoint.run_folder import read_summary
from tests.chaos.job import Attempt, Job, end_all, find_left_processes, is_held, lines, progress
from tests.chaos.mischief import Deed, Harm, a_full_share, a_kill, a_pause, a_stop, an_early_end, checkpoints, some_harm

RESTARTS = 3
DISK = "24m"
JOBS = (
    Job("mlp", {"model": "mlp"}),
    Job("convnet", {"model": "convnet", "set": ["model.args.width=8"]}, steps=260),
    Job("exact", {"model": "mlp"}, exact=True),
    Job("loaders", {"model": "mlp", "data": "tests.chaos.items:digits", "num_workers": 1}),
    Job("fsdp", {"model": "mlp"}, multi_gpu="fsdp"),
)


@dataclass(frozen=True)
class Act:
    """One launch, what is done to it, how it ends, and what is done to its folder afterwards.

    Attributes:
        ends: completed, stopped (a checkpoint of the very step), killed, early (before training), failed (full disk).
        file_limit: as a share of a checkpoint's size; no file may grow beyond.
    """

    workers: int = 2
    deeds: tuple[Deed, ...] = ()
    ends: str = "completed"
    harms: tuple[Harm, ...] = ()
    file_limit: float | None = None

    @property
    def kills(self) -> int:
        """Workers killed under an agent that starts them again."""
        return sum(deed.what == "SIGKILL" and deed.rank is not None for deed in self.deeds)

    @property
    def restarts(self) -> int:
        """A full disk is no reason to try again."""
        return 0 if self.ends == "failed" else RESTARTS

    def __str__(self) -> str:
        limit = [] if self.file_limit is None else [f"no file beyond {self.file_limit:g} of a checkpoint"]
        return f"{self.workers}w: " + (", ".join([*map(str, self.deeds), *limit, *map(str, self.harms)]) or "in peace")


@dataclass(frozen=True)
class Round:
    number: int
    job: Job
    launcher: str
    acts: tuple[Act, ...]

    @property
    def steady(self) -> int | None:
        """The number of workers, if it never changes."""
        numbers = {act.workers for act in self.acts}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def fills_disk(self) -> bool:
        return any(deed.what == "full disk" for act in self.acts for deed in act.deeds)

    def __str__(self) -> str:
        return f"{self.job.name}, {self.launcher}; " + "; ".join(map(str, self.acts))


@dataclass(frozen=True)
class Played:
    """How an act went.

    Attributes:
        code: of what was launched; None if it hung.
        missed: deeds and harms that could not be done.
        events: what the journal has of it.
        sound: the newest checkpoint that it could go on from, or None.
        damaged: checkpoints that were damaged after it.
        status: of the summary afterwards.
        orphans: processes still there.
        held: the folder is still locked.
    """

    act: Act
    code: int | None
    missed: list[str]
    events: list[dict[str, Any]]
    sound: str | None
    damaged: list[str] = field(default_factory=list)
    status: str | None = None
    orphans: list[int] = field(default_factory=list)
    held: bool = False


def draw_round(seed: int, number: int) -> Round:
    """Round `number` of a seed: always the same one."""
    dice = random.Random(f"chaos {seed} {number}")
    moving = dice.random() < 0.3
    broken = dice.choice([0, 1, 1, 2])
    acts = [_ending(dice, dice.choice([1, 2, 3]) if moving else 2) for _ in range(broken)]
    workers = dice.choice([2, 3]) if moving else 2
    kills = [a_kill(dice, workers) for _ in range(dice.choice([1, 2, 3]) if not broken else dice.choice([0, 1]))]
    pauses = [a_pause(dice, workers)] if dice.random() < 0.2 else []
    deeds = dice.sample(found := [*kills, *pauses], len(found))
    job, launcher = dice.choice(JOBS), dice.choice(["torchrun", "self"])
    if job.multi_gpu == "fsdp" and not kills:  # without a checkpoint there is no bound to what is done twice
        deeds = [a_full_share(dice, workers), *deeds]
    return Round(number, job, launcher, (*acts, Act(workers, tuple(deeds))))


def _ending(dice: random.Random, workers: int) -> Act:
    """An act that does not come to its end."""
    full = dice.choice(["limit", "small limit", "full disk"])
    kind = dice.choice(["killed", "killed", "stopped", "stopped", "stopped", "early", full, full])
    if kind == "full disk" and not may_mount():
        kind = "small limit"
    before = tuple(a_kill(dice, workers) for _ in range(dice.choice([0, 0, 1]) if workers > 1 else 0))
    harms = tuple(some_harm(dice) for _ in range(dice.choice([0, 1, 1])))
    match kind:
        case "killed":
            return Act(
                workers, (*before, Deed("SIGKILL", None, dice.randrange(25, 45), dice.uniform(0, 0.03))), kind, harms
            )
        case "stopped":
            return Act(workers, (*before, a_stop(dice, workers)), kind, harms)
        case "early":
            return Act(workers, (an_early_end(dice),), kind)
        case "full disk":
            return Act(workers, (Deed(kind, None, dice.randrange(25, 45)),), "failed")
    return Act(workers, (), "failed", (), {"limit": 0.75, "small limit": 0.05}[kind])


@cache
def may_mount() -> bool:
    """Whether this user may have a small disk of its own: root, if nothing else forbids it."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
    return True


def play(drawn_round: Round, home: Path, checkpoint_size: int) -> list[Played]:
    """Do all of it, in a folder of the round's own; the run is in home/disk/run."""
    mark, disk = uuid4().hex, home / "disk"
    disk.mkdir(parents=True)
    played: list[Played] = []
    damaged: set[str] = set()
    with mount(disk, drawn_round.fills_disk):
        try:
            for place, act in enumerate(drawn_round.acts):
                played.append(_act(drawn_round, act, f"act-{place + 1}", home, mark, damaged, checkpoint_size))
                damaged |= set(played[-1].damaged)
        finally:
            end_all(mark)
        if drawn_round.fills_disk:
            subprocess.run(["cp", "-a", str(disk / "run"), str(home / "run")], check=True)
    if not drawn_round.fills_disk:
        (disk / "run").rename(home / "run")
    return played


def _act(
    the_round: Round, act: Act, name: str, home: Path, mark: str, damaged: set[str], checkpoint_size: int
) -> Played:
    run = home / "disk" / "run"
    told, began = len(lines(run / "journal.jsonl")), progress(run)[0]
    sound = next((folder.name for folder in checkpoints(run) if folder.name not in damaged), None)
    limit = None if act.file_limit is None else int(act.file_limit * checkpoint_size)
    command = the_round.job.command(the_round.launcher, act.workers, run, act.restarts)
    attempt = Attempt(command, mark, home, name, limit)
    missed = []
    for deed in act.deeds:
        if not deed.done(attempt, run, began):
            missed.append(str(deed))
        began += deed.what == "SIGKILL"
    code = attempt.exit_code()
    orphans = find_left_processes(mark)
    (run.parent / "filler").unlink(missing_ok=True)
    status = (read_summary(run) or {}).get("status")
    kept, harmed = is_held(run), []
    for harm in act.harms:
        possible, victim = harm.done(run)
        missed += [] if possible else [str(harm)]
        harmed += [victim] if victim else []
    events = lines(run / "journal.jsonl")[told:]
    return Played(act, code, missed, events, sound, harmed, status, orphans, kept)


@contextmanager
def mount(disk: Path, wanted: bool) -> Iterator[None]:
    """A small disk of its own that can be filled, where it is wanted."""
    if not wanted:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def state_size(run: Path) -> int:
    """Bytes of a run's newest checkpoint; in pieces, of the one that each of three workers would write."""
    pieces = [file.stat().st_size for file in checkpoints(run)[0].glob("rank_*.safetensors")]
    return sum(pieces) // 3 or (checkpoints(run)[0] / "state.pt").stat().st_size


def train_undisturbed(job: Job, home: Path, workers: int) -> Path:
    """The run folder of a job that nobody disturbs; trained once."""
    folder = home / f"undisturbed-{job.name}-{workers}"
    if not folder.exists():
        attempt = Attempt(job.command("torchrun", workers, folder / "run"), uuid4().hex, folder, "act")
        try:
            code = attempt.exit_code()
        finally:
            end_all(attempt.mark)
        if code != 0:
            raise RuntimeError(f"the undisturbed run ended with {code}: {attempt.output.read_text()}")
    return folder / "run"
