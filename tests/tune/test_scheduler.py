"""Decisions, slots and the front, without a process: inheritance runs on a clock of its own."""

import math

import pytest

from multigpu_cli.tune.scheduler import (
    Job,
    Speeds,
    assign_slots,
    choose_widening,
    decide,
    list_front,
    measure_use,
    plan_epochs,
    rank_trials,
)
from multigpu_cli.tune.trials import Trial
from tests.tune.studies import make_study, make_trials

FOUR = make_study(trials=8, generation=4, rungs=[1, 2])


def test_a_generation_waits_for_its_slowest_and_then_the_best_go_on() -> None:
    trials = make_trials((0, "paused", 0.1), (0, "paused", 0.4), (0, "waiting", None), (0, "paused", 0.4))
    assert decide(FOUR, trials, idle=True) == ((), 0)
    trials[2].state = "failed"
    assert [trial.number for trial in decide(FOUR, trials, idle=False).promote] == [1, 3]
    trials[1].rung, trials[1].state = 1, "waiting"
    assert [trial.number for trial in decide(FOUR, trials, idle=False).promote] == [3]  # a driver was killed between
    trials[3].rung, trials[3].state = 1, "waiting"
    assert decide(FOUR, trials, idle=True) == ((), 0)
    trials[1].state = trials[3].state = "completed"
    assert decide(FOUR, trials, idle=False) == ((), 4)
    assert decide(FOUR, [*trials, Trial(4, {})], idle=False) == ((), 3)  # killed while it wrote the next four


def test_one_goes_on_from_each_rung_where_any_is_left() -> None:
    study = make_study(trials=2, generation=2, rungs=[1, 9])
    trials = make_trials((0, "paused", 0.1), (0, "diverged", None))
    assert [trial.number for trial in decide(study, trials, idle=False).promote] == [0]
    trials[0].state = "failed"
    assert decide(study, trials, idle=False) == ((), 0)


def test_out_of_order_the_best_that_is_there_goes_on_and_in_the_end_one_reaches_the_last_rung() -> None:
    study = make_study(order="async", trials=4, rungs=[1, 2, 4])
    trials = make_trials((0, "paused", 0.1))
    assert decide(study, trials, idle=False) == ((), 0)
    assert decide(study, trials, idle=True) == ((), 1)
    trials += make_trials((0, "paused", 0.5))
    trials[1].number = 1
    assert [trial.number for trial in decide(study, trials, idle=True).promote] == [1]
    done = make_trials((0, "paused", 0.1), (0, "failed", None), (0, "diverged", None), (0, "failed", None))
    seen = []
    while promoted := decide(study, done, idle=True).promote:
        (trial,) = promoted
        trial.rung += 1
        seen.append(trial.rung)
        trial.state = "paused" if trial.rung < 2 else "completed"
        trial.values[trial.rung] = [0.1]
    assert seen == [1, 2]


def test_the_forecast_counts_what_the_decisions_do() -> None:
    study = make_study()
    trials: list[Trial] = []
    epochs = starts = 0
    while any(decision := decide(study, trials, idle=True)):
        for trial in decision.promote:
            trial.rung += 1
        new = [Trial(len(trials) + at, {}) for at in range(decision.ask)]
        trials += new
        for trial in [*decision.promote, *new]:
            length = study.rungs[trial.rung]
            epochs, starts = epochs + length - max(trial.values, default=0), starts + 1
            trial.values[length] = [float(trial.number % 7)]
            trial.state = "completed" if trial.rung == 2 else "paused"
    assert plan_epochs(study) == (epochs, starts) == (48, 28)
    assert rank_trials(study, trials)[0].state == "completed"


def test_slots_that_are_left_help_the_slowest_as_far_as_its_micro_batches_go() -> None:
    first, second = Job(0, 0, 1, 4), Job(1, 0, 1, 4)
    waiting = {first: 1.0, second: 3.0}
    assert assign_slots(waiting, 1, 1, Speeds()) == {first: 1}
    assert assign_slots(waiting, 3, 1, Speeds()) == {first: 1, second: 2}
    assert assign_slots(waiting, 5, 1, Speeds()) == {first: 1, second: 4}
    assert assign_slots(waiting, 9, 1, Speeds()) == {first: 4, second: 4}
    assert assign_slots(waiting, 3, 1, Speeds({7: {1: 1.0, 2: 0.9, 4: 0.9}})) == {first: 1, second: 1}
    assert assign_slots(waiting, 4, 2, Speeds()) == {first: 2, second: 2}
    assert [Job(0, 0, 1, 6).widen(width, 9) for width in (1, 2, 3, 6)] == [2, 3, 6, 0]


def test_a_run_is_widened_only_where_the_gain_exceeds_the_cost_of_a_start() -> None:
    slow, fast = Job(0, 0, 1, 4), Job(1, 0, 1, 4)
    running = {slow: (1, 2, 100.0), fast: (1, 2, 10.0)}
    assert choose_widening(running, Speeds(), cost=20) == (slow, 2)
    assert choose_widening({slow: (1, 4, 100.0)}, Speeds(), cost=20) == (slow, 2)  # and from there on
    assert choose_widening({slow: (1, 1, 100.0), fast: (1, 2, 90.0)}, Speeds(), cost=20) == (fast, 2)  # other nodes
    assert choose_widening(running, Speeds(), cost=50) is None
    assert choose_widening(running, Speeds({7: {1: 1.0, 2: 1.2}}), cost=20) is None
    assert choose_widening({Job(0, 0, 1, 1): (1, 2, 100.0)}, Speeds(), cost=1) is None


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_inheritance_shortens_a_generation_on_a_clock_of_its_own(slots: int) -> None:
    """Eight equal jobs of 100 s, starts of 5 s: with widening the slots are idle for a tenth of their time at most."""
    speeds, restart = Speeds(), 5.0
    left = {Job(number, 0, 1, 8): 100.0 for number in range(8)}  # seconds on one slot
    widths: dict[Job, int] = {}
    now = busy = 0.0
    free = slots
    while left:
        for job, width in assign_slots({j: s for j, s in left.items() if j not in widths}, free, 1, speeds).items():
            widths[job], free, left[job] = width, free - width, left[job] + restart * width
        needs = {job: (width, width + free, left[job] / width) for job, width in widths.items()}
        if len(widths) == len(left) and free and (chosen := choose_widening(needs, speeds, restart)):
            job, width = chosen
            free, widths[job], left[job] = free + widths[job] - width, width, left[job] + restart * width
            continue
        step = min(left[job] / width for job, width in widths.items())
        now, busy = now + step, busy + step * sum(widths.values())
        for job, width in list(widths.items()):
            left[job] -= step * width
            if left[job] < 1e-9:
                free += widths.pop(job)
                del left[job]
    assert 1 - busy / (now * slots) <= 0.1


def test_use_counts_the_time_of_drivers_alone() -> None:
    events = [
        {"time": 0, "event": "open", "slots": 2},
        {"time": 0, "event": "start", "slots": 1},
        {"time": 10, "event": "start", "slots": 1},
        {"time": 20, "event": "beat"},  # killed
        {"time": 100, "event": "open", "slots": 2},
        {"time": 100, "event": "start", "slots": 2},
        {"time": 110, "event": "end", "slots": 2, "start_seconds": 4},
        {"time": 115, "event": "close"},
        {"time": 200, "event": "open", "slots": 3},
    ]
    assert measure_use(events) == (10 + 20 + 20, 2 * 4, 40 + 30)
    assert measure_use([]) == (0, 0, 0)


def test_the_front_is_what_nothing_beats_in_both_and_first_what_adds_most() -> None:
    study = make_study(objectives=["val_f:max", "val_g:min"], rungs=[1])
    points = [(0.0, 0.0), (4.0, 2.0), (1.0, 2.0), (5.0, 9.0), (5.0, 9.0), (2.0, 1.0)]
    trials = [Trial(at, {}, 0, "completed", {1: list(point)}) for at, point in enumerate(points)]
    trials.append(Trial(6, {}, 0, "failed"))
    assert [trial.number for trial in list_front(study, trials)] == [1, 5, 0, 3, 4]
    assert rank_trials(study, trials) == list_front(study, trials)
    assert list_front(study, []) == []
    assert math.isclose(sum(trial.values[1][0] for trial in list_front(study, trials)), 16.0)
