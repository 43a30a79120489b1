"""Optuna: proposals, its journal file and importances, from a study in memory that holds the trials of the files."""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from statistics import pstdev
from typing import Any

import numpy
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.monitor.journal import Event
from multigpu_cli.tune.space import Dimension, Params, find_place, keep_active, list_points
from multigpu_cli.tune.trials import Study, Trial

VERSIONS = {"optuna": optuna.__version__, "numpy": numpy.__version__}
SAMPLERS = ("tpe", "random", "grid")
Space = Sequence[Dimension]
Times = Mapping[int, tuple[float, float]]  # Unix seconds of a trial's first and newest event, by its number


class JournalLines(list[str], BaseJournalBackend):
    """Optuna's journal in memory: its JSON lines, which are published at once (its file backend syncs each line)."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self += [json.dumps(log, separators=(",", ":")) + "\n" for log in logs]

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        return map(json.loads, self[log_number_from:])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without notes of new studies, and that group, the journal and the importance are experimental."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


@_quiet()
def propose(study: Study, space: Space, trials: Sequence[Trial], count: int) -> list[Params]:
    """The settings of the next trials: the same for the same trials before them; fewer where a grid ends."""
    if study.sampler == "grid":
        return list(list_points(space, grid=True))[len(trials) : len(trials) + count]
    seed = int.from_bytes(sha256(f"{study.seed} {len(trials) // study.group}".encode()).digest()[:4])
    sampler: BaseSampler = RandomSampler(seed=seed)
    if study.sampler == "tpe":
        known: dict[str, Any] = {"multivariate": True, "group": True, "constant_liar": True, "constraints_func": None}
        sampler = TPESampler(n_startup_trials=study.generation, n_ei_candidates=24, seed=seed, **known)
    optuna_study = optuna.create_study(directions=_directions(study), sampler=sampler)
    _add_trials(optuna_study, study, space, trials, {})
    asked = [optuna_study.ask({each.key: _distribution(each) for each in space}).params for _ in range(count)]
    return [keep_active(space, params) for params in asked]


def _distribution(each: Dimension) -> BaseDistribution:
    if each.kind == "choice":
        return CategoricalDistribution(each.values)
    low, high = each.values
    return IntDistribution(low, high) if each.kind == "int" else FloatDistribution(low, high, log=each.kind == "log")


def _directions(study: Study) -> list[StudyDirection]:
    return [StudyDirection.MAXIMIZE if sign > 0 else StudyDirection.MINIMIZE for _, sign in study.goals]


def _add_trials(optuna_study: optuna.Study, study: Study, space: Space, trials: Sequence[Trial], times: Times) -> None:
    """Add completed trials as COMPLETE, paused and diverged ones as PRUNED with their last finite value, or as FAIL.

    Trials without an entry in `times` get the current time, which no sampler reads.
    """
    for trial in trials:
        state, more = TrialState.FAIL, dict[str, Any]()
        if trial.state == "completed":
            state, more["values"] = TrialState.COMPLETE, trial.values[max(trial.values)]
        elif trial.state == "waiting" and not trial.values:
            state = TrialState.RUNNING
        elif trial.state != "failed" and len(study.goals) == 1:  # of several, the sampler can't compare what is PRUNED
            state, more["intermediate_values"] = TrialState.PRUNED, {at: each[0] for at, each in trial.values.items()}
        own = {each.key: _distribution(each) for each in space if each.key in trial.params}
        frozen = create_trial(state=state, params=trial.params, distributions=own, **more)
        if trial.number in times:
            frozen.datetime_start, end = map(datetime.fromtimestamp, times[trial.number])
            frozen.datetime_complete = end if state.is_finished() else None
        optuna_study.add_trial(frozen)


@_quiet()
def export_journal(path: Path, study: Study, space: Space, trials: Sequence[Trial], events: Iterable[Event]) -> None:
    """Write Optuna's own journal, named after the study's folder; `events` of study.jsonl have the times of trials."""
    lines, times = JournalLines(), dict[int, tuple[float, float]]()
    for event in events:
        if (number := event.get("trial")) is not None:
            times[number] = times.get(number, (event["time"],))[0], event["time"]
    name, storage = path.parent.resolve().name, JournalStorage(lines)
    optuna_study = optuna.create_study(storage=storage, study_name=name, directions=_directions(study))
    _add_trials(optuna_study, study, space, trials, times)
    publish(path, "".join(lines).encode())


@_quiet()
def measure_importance(study: Study, space: Space, trials: Sequence[Trial]) -> list[dict[str, tuple[float, float]]]:
    """Return the share of each unconditional setting in the variance of each objective, with its standard error.

    The shares are fANOVA's over values at the first rung; the errors are a jackknife's, without each fifth of the
    trials. [] if there are fewer than 10 trials per setting, because shares would be noise, or all values are equal.
    """
    axes = [each for each in space if not each.parent]  # settings that every trial has
    own = {each.key: _distribution(each) if each.kind == "choice" else FloatDistribution(0, 1) for each in axes}
    known, found = [trial for trial in trials if trial.values], []
    evaluator = FanovaImportanceEvaluator(n_trees=32, seed=study.seed)
    for at, direction in enumerate(_directions(study) if len(known) >= 10 * len(axes) else ()):
        entries = []
        for trial in known:  # log scales as positions, because fANOVA would weight lr itself uniformly
            params = {x.key: trial.params[x.key] if x.kind == "choice" else find_place(x, trial.params) for x in axes}
            value = trial.values[min(trial.values)][at]
            entries.append(create_trial(value=value, params=params, distributions=own))
        folds = [[each for number, each in enumerate(entries) if number % 5 != fold] for fold in range(6)]
        if all(len({each.value for each in fold}) > 1 for fold in folds):
            studies = [optuna.create_study(direction=direction) for _ in folds]
            for optuna_study, fold in zip(studies, folds, strict=True):
                optuna_study.add_trials(fold)
            *parts, shares = (get_param_importances(each, evaluator=evaluator) for each in studies)  # last: all trials
            errors = {key: 2 * pstdev(float(part[key]) for part in parts) for key in shares}  # sqrt(5 - 1) times
            found.append({key: (float(share), errors[key]) for key, share in shares.items()})
    return found
