"""What Optuna is told, and that it proposes the same for the same trials."""

from math import log10
from random import Random

import optuna
import pytest
from optuna.trial import TrialState

from multigpu_cli.tune import sampler
from multigpu_cli.tune.sampler import measure_importance, propose
from multigpu_cli.tune.space import parse_search
from multigpu_cli.tune.trials import Trial
from tests.tune.studies import make_study

SPACE = parse_search(["lr=log(1e-4,1e-1)", "optimizer=choice(sgd,adamw)", "momentum=range(0,1) when optimizer=sgd"])


def run_trials(count: int, seed: int = 1, name: str = "tpe") -> list[Trial]:
    """Trials of generations of four, whose value is best at lr = 0.01."""
    study, trials = make_study(generation=4, seed=seed, sampler=name), list[Trial]()
    while len(trials) < count:
        for params in propose(study, SPACE, trials, 4):
            value = -abs(params["lr"] - 0.01) + (0.001 if params["optimizer"] == "sgd" else 0)
            trials.append(Trial(len(trials), params, 0, "paused", {1: [value]}))
    return trials


@pytest.mark.parametrize("name", ["tpe", "random"])
def test_the_same_trials_lead_to_the_same_proposals_and_conditions_hold(name: str) -> None:
    first, again, other = run_trials(16, name=name), run_trials(16, name=name), run_trials(16, seed=2, name=name)
    assert [trial.params for trial in first] == [trial.params for trial in again]
    assert [trial.params for trial in first] != [trial.params for trial in other]
    assert all(("momentum" in trial.params) == (trial.params["optimizer"] == "sgd") for trial in first)
    assert {trial.params["optimizer"] for trial in first} == {"sgd", "adamw"}
    assert propose(make_study(generation=4, sampler=name), SPACE, first[:8], 4)[:2] == [t.params for t in first[8:10]]


def test_a_grid_ends() -> None:
    space = parse_search(["n=int(1,3)", "o=choice(a,b)"])
    study = make_study(sampler="grid")
    trials = [Trial(number, params) for number, params in enumerate(propose(study, space, [], 4))]
    assert [trial.params["n"] for trial in trials] == [1, 1, 2, 2]
    assert len(propose(study, space, trials, 4)) == 2


def test_nan_is_told_as_pruned_with_its_last_value_and_a_failure_is_not_bad() -> None:
    params = {"lr": 0.01, "optimizer": "adamw"}
    trials = [
        Trial(0, params, 2, "completed", {1: [0.1], 9: [0.7]}),
        Trial(1, params, 1, "diverged", {1: [0.4]}),
        Trial(2, params, 1, "diverged"),
        Trial(3, params, 0, "paused", {1: [0.2]}),
        Trial(4, params, 0, "failed", {1: [0.2]}),
        Trial(5, params, 0, "waiting"),
    ]
    told = optuna.create_study(direction="maximize")
    sampler._add_trials(told, make_study(), SPACE, trials, {})
    complete, pruned, fail, running = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING
    assert [trial.state for trial in told.trials] == [complete, pruned, pruned, pruned, fail, running]
    assert [trial.intermediate_values for trial in told.trials[:4]] == [{}, {1: 0.4}, {}, {1: 0.2}]
    assert told.trials[0].values == [0.7]
    both = make_study(objectives=["val_a:max", "val_b:min"])
    front = optuna.create_study(directions=["maximize", "minimize"])
    both_trials = [Trial(0, params, 0, "completed", {9: [0.7, 0.1]}), Trial(1, params, 0, "diverged")]
    sampler._add_trials(front, both, SPACE, both_trials, {})
    assert [trial.state for trial in front.trials] == [complete, fail]


def make_known(count: int, seed: int, noise: float) -> list[Trial]:
    """Random trials whose value has a variance of 1 by the optimizer, and 0.375 by lr, which is uniform over a log."""
    random, trials = Random(seed), list[Trial]()
    for number in range(count):
        lr, optimizer = 10 ** random.uniform(-4, -1), random.choice(["sgd", "adamw"])
        value = 2 * (optimizer == "sgd") + log10(lr) * 0.5**0.5 + random.gauss(0, noise)
        trials.append(Trial(number, {"lr": lr, "optimizer": optimizer}, 0, "paused", {1: [value]}))
    return trials


def test_importance_finds_the_share_of_each_setting() -> None:
    (shares,) = measure_importance(make_study(), SPACE, make_known(100, 1, 0.0))
    assert list(shares) == ["optimizer", "lr"]
    assert shares["optimizer"][0] == pytest.approx(1 / 1.375, abs=0.1)
    assert sum(share for share, _ in shares.values()) == pytest.approx(1)
    assert all(0 < error < 0.1 for _, error in shares.values())
    (noisy,) = measure_importance(make_study(), SPACE, make_known(20, 1, 3.0))
    assert noisy["lr"][1] > 2 * shares["lr"][1]


def test_importance_needs_ten_trials_per_setting() -> None:
    known = make_known(20, 1, 0.0)
    assert len(measure_importance(make_study(), SPACE, known)) == 1
    assert measure_importance(make_study(), SPACE, known[1:]) == []
    assert measure_importance(make_study(), SPACE, [*known[1:], Trial(20, known[0].params)]) == []


def test_importance_of_equal_values_is_unknown() -> None:
    for trial in (known := make_known(20, 1, 0.0)):
        trial.values = {1: [0.5]}
    assert measure_importance(make_study(), SPACE, known) == []
