"""Trainers and the manager of a loop of the user's own, which calls the engine epoch by epoch or step by step."""

import atexit
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from multigpu_cli import engine
from multigpu_cli.api.functions import Functions
from multigpu_cli.api.inputs import UserInputs
from multigpu_cli.api.monitoring import MetricsCollector, clear_gpu_memory
from multigpu_cli.api.settings import MultiGPUConfig, TrainingMode
from multigpu_cli.api.training import prepare_run
from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.world import all_reduce_sum, is_out_of_memory
from multigpu_cli.errors import STOPPED, EvaluationStopped, RequestError
from multigpu_cli.faults.explain import remedy_for
from multigpu_cli.planning.batch import StepLayout
from multigpu_cli.run.evaluation import evaluate
from multigpu_cli.run.finalize import finish_run
from multigpu_cli.run.open import open_run, record_failure
from multigpu_cli.run.run import Run, use_published_weights
from multigpu_cli.tasks.base import Loss


@dataclass(frozen=True)
class Step:
    """One optimizer step's micro-batches for this process, on its device; the training loader yields these."""

    number: int  # counted from 0 over the whole run
    batches: list[Batch]  # possibly none in an epoch's last step
    layout: StepLayout


class TrainLoader:
    """The training data as steps; iterating yields the remaining steps of the current epoch."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __len__(self) -> int:
        """Optimizer steps in an epoch."""
        return self._run.plan.batches.steps_per_epoch

    def __iter__(self) -> Iterator[Step]:
        run, batches = self._run, self._run.plan.batches
        run.observer.timer.start()
        epoch, first = divmod(run.progress.step, batches.steps_per_epoch)
        for tell in run.moments.epoch_begin:
            tell(run)
        for layout, work in run.loaders.train.epoch(
            batches, epoch, first, run.world.rank, run.strategy.replicas_per_process
        ):
            if run.finished or layout.step >= run.plan.schedule.total_steps:
                return
            with run.observer.timer.data_wait:
                fetched = list(work)
            yield Step(layout.step, fetched, layout)


class MultiGPUTrainer(Functions):
    """Trains a model step by step or epoch by epoch on the engine, with its checkpoints, journal and resume.

    The functions of the API are its methods, which need no `setup`. Errors are raised rather than logged, and `auto`
    never takes DataParallel. The config may be changed until `setup`.
    """

    mode: TrainingMode | None = None

    def __init__(self, config: MultiGPUConfig | None = None) -> None:
        super().__init__()
        config = config or MultiGPUConfig()
        self.config = config if self.mode is None else replace(config, training_mode=self.mode)
        self.run: Run | None = None
        self._stack = ExitStack()

    def setup(
        self,
        model: nn.Module,
        dataset: Dataset[Any],
        val_dataset: Dataset[Any] | None = None,
        criterion: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        *,
        scheduler_step: str | None = None,
        test_dataset: Dataset[Any] | None = None,
    ) -> tuple[nn.Module, TrainLoader, Any]:
        """Freeze the settings, and build or resume the run; returns the model on its device, and the loaders.

        Args:
            criterion, scheduler, scheduler_step: as for `train_with_multi_gpu`; a scheduler that is not passed is the
                loop's own to step.

        Raises:
            RequestError: an argument is invalid, the run needs more processes (torchrun must start them), or the folder
                holds a completed run; nothing was written.
            SystemExit: a signal stopped the evaluation that a resumed run makes first (code 75).
        """
        inputs = UserInputs(model, dataset, val_dataset, test_dataset, criterion, optimizer, scheduler, scheduler_step)
        prepared = prepare_run(self.config, inputs)
        if prepared.placement.num_processes_to_launch:
            problem = f"{prepared.placement.reason}: a training loop of your own must be started in every process"
            remedy = "torchrun --nproc_per_node=N SCRIPT; launch_distributed_training(function, N); or one device"
            raise RequestError(problem, remedy=remedy)
        with ExitStack() as stack:
            self.run = stack.enter_context(open_run(stack.enter_context(prepared.open())))
            self._stack = stack.pop_all()
        atexit.register(self.close)
        _fit(self.run, until=self.run.progress.step)  # an evaluation that was left
        return prepared.objects.model, TrainLoader(self.run), self.run.loaders.val

    def train_epoch(self, train_loader: TrainLoader | None = None, epoch: int | None = None) -> dict[str, Any]:
        """Train to the end of an epoch; returns at once if a resumed run is already past it.

        Args:
            epoch: counted from 0; the current one (default), or an earlier one.

        Returns:
            loss (mean over the epoch's samples), epoch, step and learning_rate; with validation data also val_loss and
            val_accuracy (a share, 0 to 1).

        Raises:
            RequestError: epochs are skipped, or num_epochs are done.
            TrainingError: training failed; the run folder's journal shows the last step.
            SystemExit: a signal stopped it, with a checkpoint saved (code 75).
        """
        run = self._running()
        per_epoch = run.plan.batches.steps_per_epoch
        now = run.progress.step // per_epoch
        wanted = now if epoch is None else epoch
        if wanted > now:
            raise RequestError(f"epoch {wanted}: the next one is {now}", remedy="train the epochs in order, from 0")
        if wanted == now and run.progress.step >= run.plan.schedule.total_steps:
            raise RequestError(f"num_epochs={self.config.num_epochs} are done", remedy="a larger num_epochs")
        if wanted == now:
            _fit(run, until=(now + 1) * per_epoch)
        last = run.progress.last
        validated = {name: value for name, value in last.items() if name.startswith("val_")}
        rate = float(run.state.optimizer.param_groups[0]["lr"])
        facts = {"epoch": wanted, "step": run.progress.step, "learning_rate": rate}
        return {"loss": last.get("train_loss", float("nan")), **facts, **validated}

    def train_step(self, batch: Step) -> dict[str, Any]:
        """Do the training loader's next optimizer step, and after it what is due: journal, evaluation, checkpoint.

        Returns:
            loss: () float64 on the device, the mean over the global batch; grad_norm: (); skipped: (), 1 where the
            gradient was not finite; step: how many are done.

        Raises:
            RequestError: it is not the loader's next step, or the run has ended.
            TrainingError: as for `train_epoch`.
        """
        run = self._running()
        if not isinstance(batch, Step) or batch.number != run.progress.step:
            problem = "train_step: not the next batch of the train_loader that setup_training returned"
            raise RequestError(problem, remedy="for batch in train_loader: trainer.train_step(batch)")
        if run.finished:
            problem = f"train_step: step {run.progress.step} was the last of this run"
            raise RequestError(problem, remedy="trainer.finish(), or a greater num_epochs")
        with _working(run):
            outcome = engine.train_step(run, batch.layout, iter(batch.batches))
            total = all_reduce_sum(run.world, outcome.losses_by_micro_batch(run.world.device).sum())
            loss = total / run.loss_normalizer.last
            verdict = engine.finish_step(run, outcome)
        if verdict == "stopped":
            sys.exit(STOPPED)
        return {"loss": loss, "grad_norm": outcome.grad_norm, "skipped": outcome.skipped, "step": run.progress.step}

    def validate_epoch(self, val_loader: Any = None) -> dict[str, float]:
        """Return the loss, and for classes the accuracy (a share, 0 to 1), over the validation data, each sample once.

        Directly after an epoch, its evaluation is returned and not repeated. RequestError: there is no validation data.
        SystemExit: a signal stopped it, with a checkpoint saved (code 75).
        """
        run = self._running()
        if run.loaders.val is None:
            raise RequestError("validate_epoch: there is no validation data", remedy="setup_training(…, val_dataset=…)")
        last, at_the_edge = run.progress.last, run.progress.step % run.plan.batches.steps_per_epoch == 0
        if not (run.progress.step and at_the_edge and "val_loss" in last):
            with _working(run):
                try:
                    with use_published_weights(run):
                        return dict(evaluate(run, "val", run.loaders.val).metrics)
                except EvaluationStopped:
                    engine.conclude(run, stopping=True)
            sys.exit(STOPPED)
        return {name.removeprefix("val_"): value for name, value in last.items() if name.startswith("val_")}

    def finish(self) -> dict[str, Any]:
        """Finish the run: write best.pt and last.pt, evaluate the test data, and write and return the summary.

        If a signal comes in that evaluation, the status is "stopped", and the next attempt repeats it.
        """
        run = self._running()
        with _working(run):
            summary = finish_run(run, "completed")
        self.close()
        return summary

    def close(self) -> None:
        """Close what `setup` opened; a run that was not finished counts as stopped, and can be resumed."""
        if self.run is not None:
            self.run = None
            atexit.unregister(self.close)
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None and self.run is not None:
            self.finish()
        self.close()

    def _running(self) -> Run:
        if self.run is None:
            raise RequestError("the trainer has no run", remedy="setup_training(model, dataset) first")
        return self.run


@contextmanager
def _working(run: Run) -> Iterator[None]:
    """Within a call from the user's loop the watchdog is active, and an error ends the run."""
    run.observer.watchdog.paused = False
    try:
        with record_failure(run):
            yield
    finally:
        run.observer.watchdog.paused = True


def _fit(run: Run, until: int) -> None:
    """Train up to this number of steps; SystemExit: a signal stopped it, with a checkpoint saved (code 75)."""
    with _working(run):
        status = engine.fit(run, until=until)
    if status == "stopped":
        sys.exit(STOPPED)


class DataParallelTrainer(MultiGPUTrainer):
    """One process drives several GPUs (nn.DataParallel), or the only one. PyTorch recommends DDP instead."""

    mode = TrainingMode.DATA_PARALLEL


class DistributedDataParallelTrainer(MultiGPUTrainer):
    """One process per GPU, as torchrun starts them."""

    mode = TrainingMode.DISTRIBUTED_DATA_PARALLEL


TRAINERS = {each.mode: each for each in (DataParallelTrainer, DistributedDataParallelTrainer)}


class MultiGPUTrainingManager:
    """Trains in a loop of the user's own; as a context manager it finishes the run at the end.

    Attributes:
        trainer: does the work: `trainer.train_step(batch)`.
        metrics: one entry per epoch.
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

        `more`: criterion, optimizer, scheduler, scheduler_step and test_dataset, as for `MultiGPUTrainer.setup`.
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

    def generate_comparison_report(self, results: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> str:
        """Return a Markdown table with a line for each result of `train_with_multi_gpu`, or summary.

        Each line is named by its key in the mapping, or by its number (from 1) in the list. Raises TypeError if a
        result is not a mapping.
        """
        head = ("run", "strategy", "devices", "samples/s", "seconds", "final loss", "peak memory (GiB)", "speedup")
        rows, base = [], None
        by_name = results if isinstance(results, Mapping) else {str(at): each for at, each in enumerate(results, 1)}
        for name, result in by_name.items():
            if not isinstance(result, Mapping):
                raise TypeError(
                    f"result {name} is of type {type(result).__name__}, not what train_with_multi_gpu returns"
                )
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

        A script with a save_dir then resumes from the last checkpoint.
        """
        remedy = remedy_for(error) if isinstance(error, Exception) else ""
        self.errors.append({"error": str(error), "kind": type(error).__name__, "remedy": remedy})
        if is_out_of_memory(error):
            clear_gpu_memory()
        if self.trainer and self.trainer.run:
            error.add_note(f"save_dir={str(self.trainer.run.folder)!r} resumes the run from its last checkpoint")
        if remedy:
            error.add_note(f"try: {remedy}")
        raise error
