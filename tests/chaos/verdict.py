"""Whether a round did no harm: each check yields what is wrong, and finds what is planted (see test_chaos.py)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.job import lines
from tests.chaos.rounds import Act, Played, Round

WRITING = 1.0  # seconds; a checkpoint that was begun less than that before a kill need not be whole
_CURVE = ("loss", "grad_norm", "lr", "samples", "epoch")
_SAME = ("steps", "samples", "epochs", "global_batch_size", "precision")
_SAME_BITS = ("fingerprint", "final", "best")


def wrong(the_round: Round, played: list[Played], home: Path, reference: Path) -> list[str]:
    """Everything that is wrong after a round, in words.

    Args:
        home: of the round; its run is in home/run.
        reference: the run folder of the undisturbed run.
    """
    run, same_bits = home / "run", bool(the_round.steady) or the_round.job.exact
    found = [f"act {place}: {fault}" for place, part in enumerate(played, 1) for fault in of_an_act(the_round, part)]
    found += repeated_too_much(played, the_round.job.every)
    found += results_apart(run, reference, the_round.job.steps, same_bits=same_bits)
    found += left_over(home, the_round.acts)
    return [*found, *damaged_and_lost(run, played)]


def of_an_act(the_round: Round, played: Played) -> Iterator[str]:
    """How it ended, how often the agent began again, and from where."""
    act = played.act
    yield from (f"not done: {deed}" for deed in played.missed)
    yield from exit_wrong(the_round.launcher, played)
    if played.orphans:
        yield f"processes {played.orphans} outlive it"
    if played.held:
        yield "the folder is still locked"
    starts = [event for event in played.events if event["event"] == "start"]
    allowed = {1 + act.kills} if act.ends not in ("early", "failed") else {0, 1}
    if len(starts) not in allowed:
        yield f"{len(starts)} attempts trained for {act.kills} killed workers"
    if starts:
        went_on = Path(starts[0]["resumed_from"]).name if starts[0]["resumed_from"] else None
        if went_on != played.sound:
            yield f"went on from {went_on}, although {played.sound} is the newest whole checkpoint"


def exit_wrong(launcher: str, played: Played) -> Iterator[str]:
    """The exit codes of DESIGN §3; torchrun turns all but 0 into 1."""
    act, code = played.act, played.code
    torchrun = launcher == "torchrun" and act.workers > 1
    wanted = {"completed": 0, "stopped": 1 if torchrun else 75, "killed": -9, "failed": 1}.get(act.ends)
    if code is None:
        yield "it hung"
    elif act.ends == "early":
        if code == 0:
            yield "exit code 0, although it was ended before it had begun"
    elif code != wanted:
        yield f"exit code {code} instead of {wanted}"
    if act.ends in ("completed", "stopped") and played.status != act.ends:
        yield f"the summary says {played.status}"


class Repeat(NamedTuple):
    """Steps that an attempt did once more.

    Attributes:
        steps: how many.
        cause: what had come between: killed, stopped, failed or harmed.
        writing: seconds from the next checkpoint's step to the last step before; 0.0 where there was none.
    """

    steps: int
    cause: str
    writing: float


def repeats(played: list[Played], every: int) -> list[Repeat]:
    """One for each attempt but the first, counted from the journal."""
    found: list[Repeat] = []
    done_at, cause = {0: 0.0}, ""
    for part in played:
        for event in part.events:
            if event["event"] == "train":
                done_at[event["step"]] = event["time"]
            elif event["event"] == "start":
                last, began = max(done_at), int((event["resumed_from"] or "0")[-8:])
                if cause:
                    writing = done_at[last] - done_at.get(began + every, done_at[last])
                    found.append(Repeat(last - began, cause, writing))
                done_at = {step: time for step, time in done_at.items() if step <= began}
                cause = "killed"
        if part.act.harms:
            cause = "harmed"
        elif part.act.ends != "early" and cause:
            cause = part.act.ends
    return found


def repeated_too_much(played: list[Played], every: int) -> Iterator[str]:
    """A stop costs nothing; a kill what came after the last checkpoint that had been written.

    After harm or a full disk there is no bound; from which checkpoint it goes on is checked elsewhere.
    """
    for steps, cause, writing in repeats(played, every):
        if cause == "stopped" and steps:
            yield f"{steps} steps done twice after a stop"
        if cause == "killed" and steps > every and not (steps <= 2 * every and writing < WRITING):
            yield f"{steps} steps done twice after a kill, with a checkpoint every {every}"


def curve(run: Path) -> dict[str, dict[str, Any]]:
    """What the journal says of each step and each evaluation; the last line counts."""
    events = lines(run / "journal.jsonl")
    found = {f"step {event['step']}": event for event in events if event["event"] == "train"}
    found |= {f"{event['split']} after {event['step']}": event for event in events if event["event"] == "eval"}
    return {place: {name: event.get(name) for name in (*_CURVE, "accuracy")} for place, event in found.items()}


def read_trace(run: Path) -> dict[int, list[int]]:
    """step → its samples, sorted; the last line of a step counts."""
    return {line["step"]: sorted(line["samples"]) for line in lines(run / "samples.jsonl")}


def results_apart(run: Path, reference: Path, steps: int, *, same_bits: bool) -> Iterator[str]:
    """Where the finished run is another than the undisturbed one.

    Args:
        same_bits: whether losses, evaluations and weights must be equal, too, and not only steps and samples.
    """
    if not (run / "summary.json").exists():
        yield "there is no summary"
        return
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (run, reference))
    if ours["status"] != "completed":
        yield f"the run is {ours['status']}"
    for name in (*_SAME, *(_SAME_BITS if same_bits else ())):
        if ours[name] != theirs[name]:
            yield f"{name} {ours[name]} instead of {theirs[name]}"
    mine, wanted = read_trace(run), read_trace(reference)
    if sorted(mine) != list(range(1, steps + 1)):
        yield f"samples of {len(mine)} steps instead of {steps}"
    if other := [step for step in wanted if mine.get(step) != wanted[step]]:
        yield f"other samples in {len(other)} steps, from step {other[0]}"
    mine_too, wanted_too = curve(run), curve(reference)
    if mine_too.keys() != wanted_too.keys():
        yield f"the journal lacks or adds {sorted(mine_too.keys() ^ wanted_too.keys())[:5]}"
    if same_bits and (apart := [place for place in wanted_too if mine_too.get(place) != wanted_too[place]]):
        yield f"{len(apart)} journal lines differ, first {apart[0]}"
    ends = [event["status"] for event in lines(run / "journal.jsonl") if event["event"] == "end"]
    if ends.count("completed") != 1 or ends[-1] != "completed":
        yield f"the journal ends with {ends}"


def left_over(home: Path, acts: tuple[Act, ...]) -> Iterator[str]:
    """Drafts in the run folder, and temporary files but those of processes that were killed with no time to tidy up."""
    run = home / "run"
    for path in run.rglob("*"):
        if "draft" in path.name or path.suffix == ".tmp" or (path.name.startswith(".") and path.name != ".lock"):
            yield f"left over: {path.relative_to(run)}"
    excused = ["torch"]  # torchrun's own and the compiler's, which they never remove
    if any(deed.what == "SIGKILL" for act in acts for deed in act.deeds):
        excused.append("pymp-")  # a worker's sockets to its loaders
    launcher_killed = any(act.ends in ("killed", "early") for act in acts)
    for path in (home / "tmp").iterdir() if not launcher_killed else ():
        if not path.name.startswith(tuple(excused)):
            yield f"left over in TMPDIR: {path.name}"


def damaged_and_lost(run: Path, played: list[Played]) -> Iterator[str]:
    """A damaged checkpoint is reported if newer than the one that is used, and put aside when its place is needed."""
    for place, part in enumerate(played):
        later = played[place + 1 :]
        told = [event["action"] for each in later for event in each.events if event["event"] == "fault"]
        for name in part.damaged:
            if name > (later[0].sound or "") and not any(name in action for action in told):
                yield f"{name} was damaged, and nobody says so"
            if not list((run / "checkpoints").glob(f"damaged_{name}*")):
                yield f"{name} was damaged, and is gone"
