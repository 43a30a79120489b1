"""Rounds of chaos, and proof that a round cannot pass by not looking: whatever is planted is found."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.chaos.__main__ import one_round
from tests.chaos.job import Job
from tests.chaos.mischief import Deed, Harm, a_kill
from tests.chaos.rounds import JOBS, Act, Played, Round, draw_round, play, state_size, train_undisturbed
from tests.chaos.verdict import damaged_and_lost, left_over, repeated_too_much, repeats, wrong
from tests.support.run_training import run_training

KILLED_TWICE = Round(  # the second launch is a single process: few imports of torch, and another number of workers
    1,
    Job("short", {"model": "mlp"}, steps=90, exact=True),
    "self",
    (
        Act(
            2, (Deed("SIGKILL", 1, 7), Deed("SIGKILL", None, 25)), "killed", (Harm("flip a bit of", place=0.3, bit=1),)
        ),
        Act(1),
    ),
)


SEED = 20  # its first thirty rounds do everything that there is


class Looked(NamedTuple):
    """A round that was played, as the verdict sees it."""

    played: list[Played]
    home: Path
    reference: Path

    def faults(self) -> list[str]:
        return wrong(KILLED_TWICE, self.played, self.home, self.reference)


# -- real rounds


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Looked:
    """A worker killed, then the launcher, then a flipped bit in the newest checkpoint."""
    home = tmp_path_factory.mktemp("chaos")
    reference = home / "undisturbed"
    assert run_training(1, **KILLED_TWICE.job.settings(reference)).error == ""
    return Looked(play(KILLED_TWICE, home / "round", state_size(reference)), home / "round", reference)


@pytest.mark.slow
def test_a_short_round(short: Looked) -> None:
    assert short.faults() == []
    assert [part.code for part in short.played] == [-9, 0]
    assert len(short.played[0].damaged) == 1
    assert [found.cause for found in repeats(short.played, KILLED_TWICE.job.every)] == ["killed", "harmed"]


def test_a_round_is_drawn_from_its_seed_alone() -> None:
    assert draw_round(3, 2) == draw_round(3, 2)
    assert len({str(draw_round(3, number)) for number in range(30)}) == 30


def test_every_mischief_is_drawn() -> None:
    rounds = [draw_round(SEED, number) for number in range(1, 31)]
    acts = [act for each in rounds for act in each.acts]
    told = " ".join(map(str, rounds))
    assert {act.ends for act in acts} == {"completed", "stopped", "killed", "early", "failed"}
    assert {act.workers for act in acts} == {1, 2, 3}
    assert {each.launcher for each in rounds} == {"torchrun", "self"}
    wanted = [
        "SIGTERM",
        "SIGINT",
        "SIGUSR1",
        "SIGSTOP",
        "SIGKILL to rank",
        "SIGKILL to the launcher",
        "no file beyond 0.75",
        "no file beyond 0.05",
    ]
    wanted += [
        "truncate",
        "flip",
        "delete state.pt",
        "delete manifest.json",
        "delete a file",
        "delete the",
        "leave a draft",
    ]
    wanted += ["delete a file", "no room for rank"]
    assert [word for word in wanted if word not in told] == []


@pytest.mark.slow
def test_thirty_rounds(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path_factory.mktemp("30")  # short: multiprocessing's sockets below it have 108 characters for a name
    assert [number for number in range(1, 31) if not one_round(SEED, number, home)] == [], capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_three_workers_killed_at_random_times(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """torchrun --standalone --max-restarts=3: exactly three restarts, and nothing else is different."""
    dice = random.Random(seed)
    three = Round(seed, JOBS[0], "torchrun", (Act(3, tuple(a_kill(dice, 3) for _ in range(3))),))
    home = tmp_path_factory.getbasetemp()
    reference = train_undisturbed(three.job, home, 3)
    played = play(three, home / f"three-{seed}", state_size(reference))
    assert wrong(three, played, home / f"three-{seed}", reference) == []
    assert [found.cause for found in repeats(played, three.job.every)] == ["killed"] * 3


@pytest.mark.slow
def test_a_worker_that_cannot_write_its_rows_for_a_moment(tmp_path_factory: pytest.TempPathFactory) -> None:
    job = next(job for job in JOBS if job.multi_gpu == "fsdp")
    no_room = Round(1, job, "self", (Act(2, (Deed("no room", 1, 12),)),))
    home = tmp_path_factory.mktemp("chaos")
    reference = train_undisturbed(job, home, 2)
    played = play(no_room, home / "round", state_size(reference))
    assert wrong(no_room, played, home / "round", reference) == []
    faults = [event["action"] for event in played[0].events if event["event"] == "fault"]
    assert faults
    assert all("a checkpoint was not written (rank 1: [Errno 27]" in action for action in faults), faults


# -- what is planted is found


def in_summary(name: str, value: Any) -> Callable[[Looked], Looked]:
    def plant(looked: Looked) -> Looked:
        file = looked.home / "run" / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
        return looked

    return plant


def in_lines(file: str, wanted: Callable[[dict[str, Any]], bool], change: dict[str, Any] | None) -> Any:
    """Change the last line that is wanted, or with None leave it out."""

    def plant(looked: Looked) -> Looked:
        path = looked.home / "run" / file
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        at = max(place for place, line in enumerate(lines) if wanted(line))
        lines[at : at + 1] = [] if change is None else [lines[at] | change]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return looked

    return plant


def new_file(name: str) -> Callable[[Looked], Looked]:
    def plant(looked: Looked) -> Looked:
        path = looked.home / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("")
        return looked

    return plant


def in_act(number: int, **changed: Any) -> Callable[[Looked], Looked]:
    def plant(looked: Looked) -> Looked:
        looked.played[number] = replace(looked.played[number], **changed)
        return looked

    return plant


def in_events(
    number: int, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> Callable[[Looked], Looked]:
    def plant(looked: Looked) -> Looked:
        looked.played[number] = replace(looked.played[number], events=change(looked.played[number].events))
        return looked

    return plant


def without_the_damaged(looked: Looked) -> Looked:
    for folder in (looked.home / "run" / "checkpoints").glob("damaged_*"):
        shutil.rmtree(folder)
    return looked


def without_summary(looked: Looked) -> Looked:
    (looked.home / "run" / "summary.json").unlink()
    return looked


def a_step(number: int) -> Callable[[dict[str, Any]], bool]:
    return lambda line: line.get("step") == number and line.get("event", "train") == "train"


def again_from_nothing(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event | ({"resumed_from": None} if event["event"] == "start" else {}) for event in events]


PLANTED = {
    "another fingerprint": (in_summary("fingerprint", "0" * 64), "fingerprint"),
    "too few steps": (in_summary("steps", 89), "steps 89"),
    "another test result": (in_summary("final", {}), "final"),
    "other best weights": (in_summary("best", {}), "best"),
    "no summary": (without_summary, "there is no summary"),
    "not completed": (in_summary("status", "stopped"), "the run is stopped"),
    "another loss": (in_lines("journal.jsonl", a_step(90), {"loss": 0.1}), "1 journal lines differ, first step 90"),
    "a journal line missing": (in_lines("journal.jsonl", a_step(90), None), "lacks or adds ['step 90']"),
    "completed twice": (
        in_lines("journal.jsonl", lambda line: line["event"] == "checkpoint", {"event": "end", "status": "completed"}),
        "the journal ends with",
    ),
    "another sample": (
        in_lines("samples.jsonl", a_step(50), {"samples": [1]}),
        "other samples in 1 steps, from step 50",
    ),
    "an unknown step": (in_lines("samples.jsonl", a_step(90), {"step": 91}), "other samples"),
    "a draft": (new_file("run/checkpoints/.draft_step_00000050/state.pt"), "left over: checkpoints/.draft"),
    "a draft of a file": (new_file("run/.last.pt.draft"), "left over: .last.pt.draft"),
    "a hidden file": (new_file("run/.anything"), "left over: .anything"),
    "a damaged one deleted": (without_the_damaged, "was damaged, and is gone"),
    "damage unsaid": (in_events(1, lambda events: [e for e in events if e["event"] != "fault"]), "nobody says so"),
    "another exit code": (in_act(1, code=1), "exit code 1 instead of 0"),
    "the launcher not killed": (in_act(0, code=0), "exit code 0 instead of -9"),
    "a hang": (in_act(1, code=None), "it hung"),
    "a deed not done": (in_act(0, missed=["SIGKILL"]), "not done: SIGKILL"),
    "an orphan": (in_act(0, orphans=[4711]), "[4711] outlive it"),
    "a lock": (in_act(1, held=True), "still locked"),
    "a restart too many": (in_events(0, lambda events: [events[0], *events]), "3 attempts trained for 1 killed"),
    "a restart too few": (in_events(1, lambda events: events[1:]), "0 attempts trained for 0 killed"),
    "another checkpoint": (in_events(1, again_from_nothing), "went on from None, although step_000000"),
    "begun anew after a kill": (
        in_events(0, lambda events: [e | {"step": e["step"] + 30} if a_step(7)(e) else e for e in events]),
        "steps done twice after a kill",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, short: Looked, tmp_path: Path) -> None:
    plant, told = PLANTED[name]
    shutil.copytree(short.home, tmp_path / "home")
    faults = plant(Looked(list(short.played), tmp_path / "home", short.reference)).faults()
    assert any(told in fault for fault in faults), faults


@pytest.mark.slow
def test_an_older_checkpoint_that_is_damaged_need_not_be_told(short: Looked) -> None:
    newer = replace(short.played[1], events=[], sound="step_99999999")
    assert list(damaged_and_lost(short.home / "run", [short.played[0], newer])) == []


@pytest.mark.parametrize(
    ("deeds", "ends", "found"),
    [
        ((Deed("SIGTERM"),), "stopped", {"multigpu-x", "pymp-x"}),
        ((Deed("SIGKILL", 1),), "completed", {"multigpu-x"}),
        ((Deed("SIGKILL"),), "killed", set()),
    ],
)
def test_temporary_files_count_unless_their_owner_was_killed(
    deeds: tuple[Deed, ...], ends: str, found: set[str], tmp_path: Path
) -> None:
    for name in ("torchelastic_x", "multigpu-x", "pymp-x"):
        (tmp_path / "tmp" / name).mkdir(parents=True)
    told = left_over(tmp_path, (Act(2, deeds, ends), Act(2)))
    assert {text.removeprefix("left over in TMPDIR: ") for text in told} == found


def attempt(begins: int, *steps: int, seconds: float = 1.0) -> list[dict[str, Any]]:
    """Journal lines of an attempt that goes on from a step; a step takes so many seconds."""
    start = {"event": "start", "resumed_from": f"x/checkpoints/step_{begins:08d}" if begins else None}
    return [start, *({"event": "train", "step": step, "time": step * seconds} for step in steps)]


@pytest.mark.parametrize(
    ("ends", "second", "found", "complaints"),
    [
        ("killed", attempt(10, 11), [(3, "killed", 0.0)], 0),
        ("killed", attempt(0, 1), [(13, "killed", 3.0)], 1),
        ("killed", attempt(0, 1, seconds=0.1), [(13, "killed", 0.3)], 0),
        ("stopped", attempt(13, 14), [(0, "stopped", 0.0)], 0),
        ("stopped", attempt(10, 11), [(3, "stopped", 0.0)], 1),
        ("failed", attempt(0, 1), [(13, "failed", 3.0)], 0),
    ],
)
def test_repeated_steps_are_counted(
    ends: str, second: list[dict[str, Any]], found: list[tuple[Any, ...]], complaints: int
) -> None:
    seconds = second[-1]["time"] / second[-1]["step"]
    first = attempt(0, *range(1, 14), seconds=seconds)
    played = [Played(Act(ends=ends), 0, [], first, None), Played(Act(), 0, [], second, None)]
    assert [(each.steps, each.cause, round(each.writing, 3)) for each in repeats(played, 10)] == found
    assert len(list(repeated_too_much(played, 10))) == complaints
