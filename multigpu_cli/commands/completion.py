"""What the Tab key offers: names of datasets, networks, tasks and recipes, settings, run folders; without torch."""

import glob
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from multigpu_cli.config.recipes import find_recipes
from multigpu_cli.config.schema import SETTINGS
from multigpu_cli.data.registry import DATASETS
from multigpu_cli.environments.registry import ENVIRONMENTS
from multigpu_cli.models.registry import MODELS
from multigpu_cli.monitor.loggers.registry import LOGGERS
from multigpu_cli.tasks.metrics.registry import METRICS
from multigpu_cli.tasks.registry import TASKS

Offer = Callable[[str], list[str]]
"""From an incomplete word (Typer calls the parameter by this name) to the words that complete it."""


def offer_for(key: str, metavar: str) -> Offer | None:
    """What an option offers; None leaves it to the shell, which offers files.

    Args:
        metavar: how help shows the value; the words in auto|on|off are offered.
    """
    offers: dict[str, Offer] = {
        "data": _complete_from([*DATASETS, *ENVIRONMENTS]),
        "model": _complete_from(MODELS),
        "task": _complete_from(TASKS),
        "metric": _complete_from(METRICS),
        "logger": _complete_from(LOGGERS),
        "config": lambda incomplete: _complete_from(find_recipes())(incomplete),  # late: reads folders
        "set": _complete_from(f"{key}=" for key in SETTINGS),
        "save_dir": complete_run_folders,
        "resume": lambda incomplete: [
            *_complete_from(("auto", "never"))(incomplete),
            *complete_run_folders(incomplete),
        ],
    }
    choices = [word for word in metavar.split("|") if re.fullmatch("[a-z][a-z0-9-]*", word)]
    return offers.get(key) or (_complete_from(choices) if choices else None)


def run_argument(metavar: str, help: str) -> Any:
    """Declare the positional argument that is the folder of a run."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete_run_folders)


def complete_run_folders(incomplete: str) -> list[str]:
    """Run folders that continue the typed path, one level below it, or in checkpoints/ where runs go by default."""
    head, slash, name = incomplete.rpartition("/")
    place, begun = Path(head + slash or "."), glob.escape(name)
    patterns = [f"{begun}*/journal.jsonl", f"{begun}*/*/journal.jsonl"]
    if not slash and "checkpoints".startswith(name):
        patterns.append("checkpoints/*/*/journal.jsonl")
    folders = {file.parent.relative_to(place) for pattern in patterns for file in place.glob(pattern)}
    return sorted(f"{head}{slash}{folder}" for folder in folders)


def _complete_from(words: Iterable[str]) -> Offer:
    known = sorted(words)
    return lambda incomplete: [word for word in known if word.startswith(incomplete)]
