"""`tune` and `tune report`: their options; what they do is imported late."""

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

app = typer.Typer(cls=Group, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
@with_train_options
def tune(
    context: typer.Context,
    *,
    search: Annotated[list[str], option("KEY=EXPR|FILE", "range, int, log or choice(…); may be repeated")] = [],  # noqa: B006
    objective: Annotated[list[str], option("NAME:max|NAME:min", "val_accuracy:max, say; of several a front")] = [],  # noqa: B006
    trials: Annotated[str, option("N", "how many settings are tried")] = "20",
    rungs: Annotated[str, option("N,N", "epochs after which only the best go on")] = "",
    generation: Annotated[str, option("N", "trials that are proposed together")] = "8",
    sampler: Annotated[str, option("tpe|random|grid", "what proposes them")] = "tpe",
    seeds: Annotated[str, option("N", "runs of each trial, which counts by their mean")] = "1",
    budget: Annotated[str | None, option("Nslot-hours|Nepochs", "beyond it no rung begins")] = None,
    slots: Annotated[str | None, option("N", "runs at a time (default: one per GPU or core)")] = None,
    gpus_per_trial: Annotated[str, option("N", "slots that each run begins with")] = "1",
    srun: Annotated[bool, typer.Option("--srun", help="slots are those of this SLURM allocation")] = False,
    order: Annotated[str, option("fixed|async", "async: faster, and not reproducible")] = "fixed",
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
    top: Annotated[str | None, option("N", "only the commands of the best so many trials")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Show a study: its best trials, how it went, and a picture of all of them."""
    from multigpu_cli.tune.report import format_study, report_study

    found = report_study(Path(study), parse_option(integer(1), "--top", top))
    print_result(found, format_study(found), as_json=as_json)
