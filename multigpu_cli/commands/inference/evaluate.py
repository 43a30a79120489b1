"""The metrics of a run's weights on a split of its data, or of other data."""

from collections.abc import Iterator
from typing import Any

from multigpu_cli.commands.inference.distributed_pass import InferencePass, run_distributed
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.monitor import format


def evaluate_run(request: InferenceRequest) -> dict[str, Any] | None:
    """Metrics over exactly the samples of the split, the same bits on any number of workers; None on ranks above 0.

    Raises:
        RequestError: the run can't be evaluated.
    """
    return run_distributed(request, _compute_metrics, needs_targets=True)


def _compute_metrics(part: InferencePass) -> dict[str, Any]:
    evaluated = part.task.evaluate(part.model, part.loader, part.world, part.precision, part.batch_size)
    facts = {"weights": part.origin, "split": part.split, "samples": evaluated.samples, "world_size": part.world.size}
    return facts | evaluated.metrics | evaluated.details


def format_metrics(metrics: dict[str, Any]) -> Iterator[str]:
    """The metrics in one line, and the tables that the task has."""
    apart = {"per_class", "confusion", "world_size"}
    yield format.format_eval_line({name: value for name, value in metrics.items() if name not in apart})
    if rows := metrics.get("per_class"):
        names = [str(row["class"]) for row in rows]
        yield from format.format_class_table(rows, names)
        if "confusion" in metrics:
            yield from format.format_confusion_table(metrics["confusion"], names)
