"""A study on disk: study.yaml, frozen when it begins, and a trial.json for each trial, renamed into place."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.config.regular_files import read_small
from multigpu_cli.config.resume_rules import choose_mode
from multigpu_cli.config.yaml_text import UnreadableError, compose, dump, dump_value, parse_typed
from multigpu_cli.errors import RequestError, did_you_mean, make_line
from multigpu_cli.monitor.history import load_history, load_summary
from multigpu_cli.monitor.journal import check_fields, dump_json
from multigpu_cli.monitor.tensorboard import flatten
from multigpu_cli.tune.space import Params, check_params, parse_search

STUDY, TRIAL = "study.yaml", "trial.json"
_NO_METRIC = ("event", "time", "epoch", "step", "split", "samples")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a study is a function of; `settings` are those of all trials, as they stand in a YAML file."""

    search: dict[str, str]
    objectives: list[str]  # val_NAME:max or min
    trials: int
    rungs: list[int]  # epochs after which trials are compared; the last is their whole length
    generation: int  # trials that are compared with each other
    sampler: str
    order: str
    seed: int
    seeds: int
    gpus_per_trial: int
    multi_gpu: str
    budget: str | None
    versions: dict[str, str]
    settings: dict[str, Any]
    best: str | None = None  # as --best; None: a study of an earlier version, in which a run's last epoch counts

    @property
    def goals(self) -> list[tuple[str, float]]:
        """Of each objective the number in an evaluation, and 1 where the greatest is best, -1 where the least is."""
        pairs = (text.removeprefix("val_").split(":") for text in self.objectives)
        return [(name, 1.0 if which == "max" else -1.0) for name, which in pairs]

    @property
    def group(self) -> int:
        """Trials that are proposed together."""
        return self.generation if self.order == "fixed" else 1

    def run_folder(self, path: Path, trial: int, run: int) -> Path:
        """Of one seed of a trial: the trial's own folder, or one below it for each of several seeds."""
        folder = path / "trials" / f"{trial:04d}"
        return folder if self.seeds == 1 else folder / f"seed-{self.seed + run}"

    def write(self, path: Path) -> None:
        publish(path / STUDY, dump(asdict(self)).encode(), mode=choose_mode(self.settings.get))


@dataclass
class Trial:
    """One configuration, with its progress and results."""

    number: int
    params: Params
    rung: int = 0  # that it is to reach, or has reached
    state: str = "waiting"  # for its rung; paused, there; completed; failed; diverged: NaN
    values: dict[int, list[float]] = field(default_factory=dict)  # of the objectives, by epochs: means over the seeds
    fingerprint: str | None = None  # of the trained weights, of each seed; None before the end
    error: str = ""

    def score(self, study: Study) -> tuple[float, ...]:
        """Return the newest values of the objectives, with signs such that a greater value is better."""
        newest = self.values[max(self.values)]
        return tuple(sign * value for (_, sign), value in zip(study.goals, newest, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the value of a single objective stands alone."""
        return asdict(self) | {"values": {at: each[0] if len(each) == 1 else each for at, each in self.values.items()}}

    def write(self, path: Path) -> None:
        file = path / "trials" / f"{self.number:04d}" / TRIAL
        file.parent.mkdir(parents=True, exist_ok=True)
        publish(file, (dump_json(self.as_dict(), indent=1) + "\n").encode())


def read_study(path: Path) -> tuple[Study, list[Trial]]:
    """A study and its trials in their order; RequestError: there is none, or it can't be read."""
    file = path / STUDY
    if not file.is_file():
        raise RequestError(f"{path}: holds no study", remedy="the --save-dir of tune")
    try:
        content, trials = parse_typed(compose(read_small(file).decode())), []  # type: ignore[arg-type]
        check_fields(content, STUDY)
        study = Study(**content)
        space = parse_search([f"{key}={text}" for key, text in study.search.items()])
        for number, file in enumerate(sorted(path.glob(f"trials/*/{TRIAL}"))):
            check_fields(content := json.loads(read_small(file)), TRIAL)
            lists = {int(at): each if isinstance(each, list) else [each] for at, each in content["values"].items()}
            values = {at: [float(of) for of, _ in zip(each, study.goals, strict=True)] for at, each in lists.items()}
            trials.append(Trial(**content | {"values": values}))
            if trials[-1].number != number or (trials[-1].state == "completed" and not values):
                raise ValueError(f"trial {number} is missing, or its values are")
            if not all(0 <= at <= max(study.rungs) for at in values):
                raise ValueError(f"trial {number} has values of an epoch beyond the last rung")
            check_params(space, trials[-1].params)
    except (OSError, UnreadableError, ValueError, TypeError, AttributeError, RecursionError) as error:
        problem = make_line(f"{file}: can't be read ({getattr(error, 'problem', error)})")
        raise RequestError(problem, remedy="another --save-dir") from error
    return study, trials


def continue_study(path: Path, stored: Study, trials: Sequence[Trial], wanted: Study) -> Study:
    """Return the study of a folder with the budget and the number of trials that the command asks for.

    RequestError: something else differs, or another major version would propose the trials, or a study with this number
    of trials from the start would have promoted different ones.
    """
    for package, version in wanted.versions.items():
        before = stored.versions.get(package, "")
        if before.split(".")[0] != version.split(".")[0]:
            problem = f"{path} was begun with {package} {before}, and here is {version}: it would propose other trials"
            raise RequestError(problem, remedy=f"pip install '{package}=={before}', or another --save-dir")
    free: dict[str, Any] = {"budget": None, "versions": None, "trials": 0} | ({} if stored.best else {"best": None})
    old, new = ({key: dump_value(value) for key, value in flatten(asdict(each) | free)} for each in (stored, wanted))
    pairs = [(key, old.get(key, "not set"), new.get(key, "not set")) for key in old | new]
    if differing := [f"\n    {key}: {was}; this command: {now}" for key, was, now in pairs if was != now]:
        problem = f"--save-dir {path}: its study was started with different settings:{''.join(differing)}"
        raise RequestError(problem, remedy="use the command that started it, or another --save-dir")
    last = trials[stored.trials // stored.group * stored.group :]  # [] if its last generation is full
    if wanted.trials < stored.trials or (wanted.trials > stored.trials and any(trial.rung for trial in last)):
        grows = f"only grows, and after a comparison at a rung by whole generations of {stored.generation}"
        problem = f"--trials {wanted.trials}: the study in {path} has {stored.trials}, and {grows}"
        raise RequestError(problem, remedy=f"use --trials {stored.trials}, or another --save-dir")
    return replace(stored, budget=wanted.budget, trials=wanted.trials)


class RungResult(NamedTuple):
    """What the files of a run say."""

    values: list[float] | None = None  # of the objectives; None before the run has reached its rung
    epochs: int = 0  # that it has done
    completed: bool = False
    fingerprint: str | None = None


def read_rung(folder: Path, study: Study, epochs: int) -> RungResult:
    """Return how far a run has come, with the objectives of its best weights if it has reached this many epochs.

    A run whose last evaluation is not finite has diverged: the values are those of this evaluation. RequestError:
    the evaluations do not report an objective.
    """
    if not (folder / "journal.jsonl").is_file():
        return RungResult()
    history, summary = load_history(folder), load_summary(folder)
    done, ended = history.step // int(history.plan.get("steps_per_epoch", 1)), summary.get("status")
    if ended != "completed" and not (ended == "stopped" and done >= epochs):
        return RungResult(epochs=done)
    evals = (event for (_, split), event in sorted(history.evals.items()) if split == "val")
    *_, last = {}, *(event for event in evals if event["epoch"] <= epochs)
    for name, _ in study.goals:
        if name not in last:
            known = [f"val_{each}" for each in last if each not in _NO_METRIC]
            remedy = did_you_mean(f"val_{name}", known) if known else "data with a validation split"
            raise RequestError(f"--objective val_{name}: no evaluation has it", remedy=remedy)
    values = [float(last[name]) for name, _ in study.goals]
    if study.best and all(map(math.isfinite, values)):
        # best.pt has these weights, and is tested; a run whose --best is always NaN publishes the last ones
        values = [float((summary.get("best") or last)[name]) for name, _ in study.goals]
    return RungResult(values, done, ended == "completed", summary.get("fingerprint"))
