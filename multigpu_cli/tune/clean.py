"""`tune clean`: removes the checkpoints of trials that a study no longer needs."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.commands.clean import Cleaning, clean_folders
from multigpu_cli.monitor.history import JOURNAL
from multigpu_cli.tune.scheduler import decide, rank_trials
from multigpu_cli.tune.trials import Study, Trial, read_study


def clean_study(path: Path, *, remove: bool) -> list[Cleaning]:
    """List the checkpoints of each trial that can be removed, and remove them if requested.

    RequestError: there is no study, or a driver is running and `remove` is requested.
    """
    read_study(path)  # before a lock is written into the folder
    with lock_folder(path) if remove else nullcontext():
        study, trials = read_study(path)
        needed = list_needed(study, trials)
        trial_of = {study.run_folder(path, each.number, run): each for each in trials for run in range(study.seeds)}
        runs = [folder for folder in trial_of if (folder / JOURNAL).is_file()]
        return clean_folders(runs, lambda run: "needed" * (trial_of[run] in needed), remove=remove)


def list_needed(study: Study, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials whose checkpoints a study may still use: the best ones, and those that may continue."""
    best = rank_trials(study, trials)[: None if len(study.goals) > 1 else 1]
    # earlier generations are decided for good; without order, a paused trial may continue even if --trials grows later
    last = max(0, len(trials) - 1) // study.generation * study.generation if study.order == "fixed" else 0
    is_over = study.order == "fixed" and not any(decide(study, trials, idle=True))
    may_continue = (
        each for each in trials[last:] if each.state == "waiting" or (each.state == "paused" and not is_over)
    )
    return [*best, *may_continue]
