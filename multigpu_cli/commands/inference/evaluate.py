"""The metrics of a run's weights on a split of its data, or of other data."""

from typing import Any

from multigpu_cli.commands.inference.distributed_pass import InferencePass, run_distributed
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.monitor import format
from multigpu_cli.monitor.journal import dump_json


def evaluate_run(request: InferenceRequest) -> dict[str, Any] | None:
    """Metrics over exactly the samples of the split, the same bits on any number of workers; None on ranks above 0.

    Raises:
        RequestError: the run can't be evaluated.
    """
    return run_distributed(request, _compute_metrics, judged=True)


def _compute_metrics(part: InferencePass) -> dict[str, Any]:
    evaluated = part.task.evaluate(part.model, part.loader, part.world, part.precision, part.batch_size)
    facts = {"weights": part.origin, "split": part.split, "samples": evaluated.samples, "world_size": part.world.size}
    return facts | evaluated.metrics | evaluated.details


def print_metrics(metrics: dict[str, Any], *, as_json: bool) -> None:
    """Print the metrics, and the tables that the task has."""
    if as_json:
        print(dump_json(metrics, indent=2))
        return
    tables = {"per_class", "confusion"}
    print(
        format.format_eval_line({name: value for name, value in metrics.items() if name not in tables | {"world_size"}})
    )
    if rows := metrics.get("per_class"):
        names = [str(row["class"]) for row in rows]
        for line in format.format_class_table(rows, names):
            print(line)
        for line in format.format_confusion_table(metrics["confusion"], names) if "confusion" in metrics else ():
            print(line)
