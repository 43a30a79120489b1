"""The options of `tune`, `tune report` and `tune clean`, which import Optuna late."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from multigpu_cli.commands.options import (
    Command,
    Group,
    list_given_flags,
    option,
    print_result,
    run_argument,
    with_train_options,
)
from multigpu_cli.commands.requests import parse_option
from multigpu_cli.config.types import integer
from multigpu_cli.errors import RequestError

_OBJECTIVE = option("NAME:max|NAME:min", "metric to optimize, e.g. val_accuracy:max; repeat for a Pareto front")
_BUDGET = option("Nslot-hours|Nepochs", "start no further rung after this amount of compute")
app = typer.Typer(cls=Group, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
@with_train_options
def tune(
    context: typer.Context,
    *,
    search: Annotated[list[str], option("KEY=EXPR|FILE", "range, int, log or choice(…); repeatable")] = [],  # noqa: B006
    objective: Annotated[list[str], _OBJECTIVE] = [],  # noqa: B006
    trials: Annotated[str, option("N", "number of trials; may be raised later")] = "20",
    rungs: Annotated[str, option("N,N", "epochs after which only the best trials continue")] = "",
    generation: Annotated[str, option("N", "trials that are proposed and compared together")] = "8",
    sampler: Annotated[str, option("tpe|random|grid", "how trials are proposed")] = "tpe",
    seeds: Annotated[str, option("N", "runs per trial, with different seeds; the score is their mean")] = "1",
    budget: Annotated[str | None, _BUDGET] = None,
    slots: Annotated[str | None, option("N", "number of concurrent runs (default: one per GPU or core)")] = None,
    gpus_per_trial: Annotated[str, option("N", "slots per run at its start")] = "1",
    srun: Annotated[bool, typer.Option("--srun", help="use the slots of this SLURM allocation")] = False,
    order: Annotated[str, option("fixed|async", "async: decide as slots become free; not reproducible")] = "fixed",
    **values: Any,
) -> Any:
    """Search for better settings. Trials are runs that pause, resume, and share the GPUs."""
    given = {name: value for name, value in locals().items() if name not in ("context", "values")}
    if context.invoked_subcommand is None:
        return partial(_run_study, given, values, context.obj)
    if flags := list_given_flags(values):
        raise RequestError(f"{flags[0]} stands before the command 'report'", remedy="tune report DIR")
    return None


def _run_study(*request: Mapping[str, Any]) -> int:
    try:
        from multigpu_cli.tune.study import run_study
    except ModuleNotFoundError as error:
        raise RequestError(f"tune needs {error.name}", remedy="pip install 'multigpu-cli[tune]'") from error
    return run_study(*request)


@app.command(cls=Command)
def report(
    study: Annotated[str, run_argument("DIR", "the --save-dir of tune")],
    top: Annotated[str | None, option("N", "print only the commands of the N best trials")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Show a study: its best trials, the importance of settings, and a plot of all trials."""
    from multigpu_cli.tune.report import format_study, report_study

    found = report_study(Path(study), parse_option(integer(1), "--top", top))
    print_result(found, format_study(found), as_json=as_json)


@app.command(cls=Command)
def clean(
    study: Annotated[str, run_argument("DIR", "the --save-dir of tune")],
    yes: Annotated[bool, typer.Option("--yes", help="remove them; otherwise they are only listed")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """List the checkpoints of trials that won't continue; --yes removes them. The winner keeps its own."""
    from multigpu_cli.commands.clean import format_cleaning
    from multigpu_cli.tune.study import clean_study

    result = clean_study(Path(study), remove=yes)
    print_result(result, format_cleaning(result), as_json=as_json)
