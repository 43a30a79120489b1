"""`MultiGPUTrainingManager`: trainer, metrics and fault tolerance for a training loop of the user's own."""

import json
from collections.abc import Mapping
from typing import Any, Self

from torch import nn
from torch.utils.data import Dataset

from multigpu_cli.api.monitoring import MetricsCollector, clear_gpu_memory
from multigpu_cli.api.settings import MultiGPUConfig, TrainingMode
from multigpu_cli.api.trainers import TRAINERS, MultiGPUTrainer, TrainLoader
from multigpu_cli.distributed.out_of_memory import is_out_of_memory
from multigpu_cli.faults.explain import remedy_for


class MultiGPUTrainingManager:
    """Trains in a loop of the user's own; as a context manager it finishes the run at the end.

    Attributes:
        trainer: does the work: `trainer.train_step(batch)`.
        metrics: a MetricsCollector with one entry per epoch.
        fault_tolerance: a FaultToleranceManager.
    """

    def __init__(self, config: MultiGPUConfig | None = None) -> None:
        self.config = config or MultiGPUConfig()
        self.trainer = MultiGPUTrainer(self.config)
        self.metrics = MetricsCollector()
        self.fault_tolerance = FaultToleranceManager(self.trainer)

    def setup_training(
        self, model: nn.Module, dataset: Dataset[Any], val_dataset: Dataset[Any] | None = None, **more: Any
    ) -> tuple[nn.Module, TrainLoader, Any]:
        """Freeze the config, and build or resume the run; returns model, training and validation loader.

        Args:
            more: criterion, optimizer, scheduler, scheduler_step, test_dataset, as for MultiGPUTrainer.setup.

        Raises:
            RequestError: an argument is invalid; nothing was written.
        """
        self.trainer = TRAINERS.get(TrainingMode.named(self.config.training_mode), MultiGPUTrainer)(self.config)
        self.fault_tolerance = FaultToleranceManager(self.trainer)
        return self.trainer.setup(model, dataset, val_dataset, **more)

    def train_epoch(self, train_loader: TrainLoader | None = None, epoch: int | None = None) -> dict[str, Any]:
        """As MultiGPUTrainer.train_epoch; also adds an entry to `metrics`."""
        results = self.trainer.train_epoch(train_loader, epoch)
        if self.trainer.run is not None:
            self.metrics.record(results["loss"], self.trainer.run.observer.timer)
        return results

    def validate_epoch(self, val_loader: Any = None) -> dict[str, float]:
        """As MultiGPUTrainer.validate_epoch."""
        return self.trainer.validate_epoch(val_loader)

    def finish(self) -> dict[str, Any]:
        """As MultiGPUTrainer.finish."""
        return self.trainer.finish()

    def generate_comparison_report(self, results: Mapping[str, Mapping[str, Any]]) -> str:
        """A Markdown table of measurements: one line for each result of `train_with_multi_gpu`, or summary, by name."""
        head = ("run", "strategy", "devices", "samples/s", "seconds", "final loss", "peak memory (GiB)", "speedup")
        rows, base = [], None
        for name, result in results.items():
            summary = result.get("summary", result)
            rate = summary.get("samples_per_second")
            base = base or rate
            peaks = summary.get("peak_memory_bytes")
            peak = max(peaks) / 2**30 if peaks else None
            loss = result.get("final_loss", summary.get("final", {}).get("train_loss"))
            numbers = (summary.get("strategy"), summary.get("devices"), rate, summary.get("train_seconds"), loss, peak)
            rows.append((name, *numbers, rate / base if rate and base else None))
        lines = [head, ("---",) * len(head), *(tuple(map(_format_cell, row)) for row in rows)]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    _generate_comparison_report = generate_comparison_report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.trainer.__exit__(*error)


def _format_cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


class FaultToleranceManager:
    """Explains an error of a training step.

    Training does not continue after it: a failed step leaves replicas that differ, or an incomplete gradient. The
    engine itself survives a lack of memory, with smaller micro-batches.

    Attributes:
        errors: what was handled, as dicts with error, kind and remedy.
    """

    def __init__(self, trainer: MultiGPUTrainer | None = None) -> None:
        self.trainer = trainer
        self.errors: list[dict[str, Any]] = []

    def handle_error(self, error: BaseException) -> dict[str, Any]:
        """Record the error, free cached memory after a lack of it, and raise it again with the remedy as a note.

        Raises:
            BaseException: the same error, always; a script with a save_dir resumes from the last checkpoint.
        """
        remedy = remedy_for(error) if isinstance(error, Exception) else ""
        self.errors.append({"error": str(error), "kind": type(error).__name__, "remedy": remedy})
        if is_out_of_memory(error):
            clear_gpu_memory()
        folder = self.trainer.run.folder if self.trainer and self.trainer.run else None
        if folder:
            error.add_note(f"save_dir={str(folder)!r} resumes the run from its last checkpoint")
        if remedy:
            error.add_note(f"try: {remedy}")
        raise error
