"""The interface of tasks: a loss for training and its units, exact sums for evaluation, and the order of results."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import nan
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from multigpu_cli.config.schema import DataConfig, TaskConfig
from multigpu_cli.data.loader import Batch, BatchStream, Loader
from multigpu_cli.data.order import EVAL_EPOCH
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World, all_reduce_max, all_reduce_sum, run_on_all_ranks
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.meters import add_exactly
from multigpu_cli.runtime.module_state import eval_mode, preserve_buffers
from multigpu_cli.runtime.precision import Precision, at_least_float32
from multigpu_cli.runtime.seeding import seed_micro_batch
from multigpu_cli.tasks.global_loss import Columns, GlobalLoss
from multigpu_cli.tasks.metric import Metric, MetricMeter

Loss = Callable[[Any, Any], Tensor]  # a user's own loss: outputs and targets → a mean, or one loss for each sample
Result = TypeVar("Result")
RENAMED = {  # earlier names of methods that a task may override: no longer called, so a task that has one is refused
    "feed": "train_stream",
    "begin": "check_model",
    "told": "log_fields",
    "enough": "stop_reason",
    "evaluates": "should_evaluate",
    "pictures": "plots",
    "expects": "expected_shapes",
}


class BatchMetrics(NamedTuple):
    """The sums of one batch of an evaluation."""

    loss_sum: Tensor  # () float64, summed over the units
    counts: Tensor  # (k,) int64, the task's counts; integers add up exactly in any order
    sums: Tensor | None = None  # (s,) float64, summed over the units: one for each of the task's `sums`
    columns: Columns | None = None  # rows and targets in host memory, from which a `global_loss` computes the loss


class Evaluation(NamedTuple):
    """The result of one pass over a split."""

    metrics: dict[str, float]  # loss and the task's metrics, each over exactly `samples` samples
    samples: int
    details: dict[str, Any]  # tables for the final report (per class, confusion), or empty


class Task(ABC):
    """Base class of all tasks; a user's own is given as --task module:Class.

    The loss of a step, and of an evaluation, is a sum over units divided by their number over all workers. Units are
    samples, unless a task says otherwise.

    Args:
        source: the dataset, for class count and names.
        config: label smoothing and the like.
    """

    logits_note: str = ""  # how many logits are in memory at a time, for the plan; `check_model` finds out
    unit: str = "sample"  # what the loss is the mean over
    units_per_sample: int = 1  # of an ordinary sample: sums are divided by it at once, so that they stay in range
    rows_per_sample: int = 1  # of what the model is called with
    sums: tuple[str, ...] = ()  # names of the sums of an evaluation beside the loss
    expected_shapes: str = "what its loss_sum and measure take"  # of targets and outputs, for messages
    equal_passes: bool = False  # every worker runs the model equally often in an evaluation: each pass communicates
    supports_equal_passes: bool = False  # a task with its own `evaluate` sees to that, or `super().evaluate` does
    global_loss: GlobalLoss | None = None  # a loss over the global batch, instead of a sum over the units
    group_size: int = 0  # samples for which an evaluation computes a `global_loss` at once; 0: all
    own_metrics: Sequence[Metric] = ()  # of --metric; an evaluation gives them beside the task's
    moved: Callable[[], None]  # called in long work other than forward and backward: the watchdog sees progress
    batch_evaluated: Callable[[int], None]  # called in an evaluation with how many of this worker's batches are done
    meet: Callable[[int, bool], int] | None = None
    """Called by all ranks together in an evaluation, with the number of passes since its start, and whether this rank
    may have more. Returns the number of passes up to the next call, 0 if no rank has more; may raise on all ranks."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for old, new in RENAMED.items():
            if hasattr(cls, old) and getattr(cls, new) is getattr(Task, new):
                problem = f"{cls.__module__}:{cls.__name__} has {old!r}, which is now called {new!r}"
                raise RequestError(problem, remedy=f"rename it to {new}")

    def __init__(self, source: DataSource, config: TaskConfig) -> None:
        self.source, self.config = source, config
        self.moved, self.batch_evaluated = lambda: None, lambda done: None

    def train_stream(self, config: DataConfig, world: World, seed: int) -> BatchStream:
        """This worker's training data; a task may return its own stream of micro-batches."""
        return self.loader("train", config, world, seed)  # type: ignore[no-any-return]

    def loader(self, split: str, config: DataConfig, world: World, seed: int) -> Any:
        """This worker's part of a split, for `evaluate`."""
        data, here = getattr(self.source, split), world.local_size
        return Loader(data, self.source, config, device=world.device, seed=seed, workers_here=here)

    def check_model(self, model: nn.Module, precision: Precision) -> None:  # noqa: B027 - most tasks need no more of it
        """Check the model before its first batch; raise RequestError if it does not fit the task."""

    def class_names(self, classes: int) -> tuple[str, ...]:
        """The dataset's names of the classes, or else their numbers."""
        return self.source.class_names or tuple(map(str, range(classes)))

    @abstractmethod
    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """(): the loss of one micro-batch, summed (not averaged) over its units."""

    def units(self, batch: Batch) -> Tensor | int:
        """How many units `loss_sum` sums over: an int, or () int64 on the batch's device."""
        return len(batch)

    def after_step(self, model: nn.Module, step: int, outputs: Any) -> None:  # noqa: B027 - most tasks need none
        """Update state that is neither a trained weight nor a mean, after each optimizer step that was not skipped.

        All ranks call it together, without gradients, and may write weights and buffers of the model: the same on each
        rank. A model may have a method `after_step(step, outputs)` of its own, which is called first.

        Args:
            model: the network itself, not what the strategy wraps it in.
            step: number of the optimizer step, counted from 1 over the whole run, with skipped steps.
            outputs: `step_outputs` of all micro-batches of all workers, each tensor joined along dimension 0 in their
                order; a () tensor counts as one row. May be left out of the parameters: then nothing is gathered.
        """

    def step_outputs(self, returned: Any) -> Any:
        """Return the part of the model's outputs that `after_step` gets: tensors, or mappings and tuples of them."""
        return returned

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        """The sums of one batch of an evaluation."""

    def _measure_global_loss(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        """`measure` of a task with a `global_loss`: the batch as a group of its own, and its rows."""
        assert self.global_loss is not None
        loss, columns = self.global_loss.measure(model, batch)
        return BatchMetrics(loss, torch.zeros(0, dtype=torch.int64, device=loss.device), columns=columns)

    def metrics(self, counts: Tensor, units: int) -> dict[str, float]:
        """Metrics beside the loss, from the counts, which are sums over `units`."""
        return {}

    def figures(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics beside the loss, from the means over units of the loss and of the task's `sums`."""
        return {}

    def pair_with_targets(self, outputs: Any, batch: Batch) -> tuple[Any, Any]:
        """What the metrics of --metric compare: the model's outputs for a batch, and the targets."""
        return at_least_float32(outputs) if isinstance(outputs, Tensor) else outputs, batch.targets

    def details(self, counts: Tensor) -> dict[str, Any]:
        """Tables from the summed counts, for the final report."""
        return {}

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """What `predict` writes of a batch of n samples: a tensor (n, …), or several in a mapping or a tuple."""
        return model(batch.inputs)

    def predictions(self, model: nn.Module, batch: Batch) -> dict[str, list[Any]]:
        """Predictions and targets as columns of a table with one row per sample, in plain values; {}: the `outputs`."""
        return {}

    def suggest_task(self, target: Any) -> str:
        """What to type for a sample with a target that this task does not take; "" where that may be anything."""
        return ""

    def should_evaluate(self, epoch: int) -> bool:
        """Whether to evaluate the validation split after this epoch; after the last one it always is."""
        return True

    def stop_reason(self) -> str:
        """Why the run ends here, such as a goal reached; "" while it goes on."""
        return ""

    def log_fields(self, seconds: float) -> dict[str, Any]:
        """More fields of a `train` line, after so many seconds of training; all ranks call it together."""
        return {}

    def state(self, world: World) -> dict[str, Any]:
        """The task's state of all ranks for a checkpoint: plain values and tensors; all ranks call it together."""
        return {}

    def load_state(self, state: dict[str, Any], world: World) -> str:
        """Restore a state, perhaps on another number of ranks; returns a warning about what could not be restored."""
        return ""

    def plots(self, summary: dict[str, Any]) -> dict[str, bytes]:
        """Plots for the run folder by file name, drawn from the summary of a completed run."""
        return {}

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        """The key that orders results: the greatest is the best; one with NaN never is."""
        return (-metrics["loss"],)

    def evaluate(
        self, model: nn.Module, loader: Loader, world: World, precision: Precision, batch_size: int
    ) -> Evaluation:
        """One pass: each sample counted once, and the same bits on any number of workers.

        The sums of each batch have a slot of their own, which one worker fills; the slots are added without rounding
        (Shewchuk's fsum). A batch that did not fit on some rank raises OutOfMemory on all of them; with `equal_passes`
        it raises torch.OutOfMemoryError, or a RuntimeError like it, on this rank, and others wait for its part.
        """
        batches = -(-loader.size // batch_size)
        own = _RankSums(batches, MetricMeter(self.own_metrics, batches, world))
        with eval_mode(model):
            self.run_passes(world, self._measure_batches(model, loader, world, precision, batch_size, own))
        size = int(all_reduce_max(world, [0 if own.counts is None else own.counts.numel()])[0])
        counts = torch.zeros(size) if own.counts is None else own.counts  # of a rank without a batch
        slots = own.slots
        units = torch.as_tensor(own.units).to(slots)  # whole numbers are exact below 2⁵³
        parts = [slots.flatten(), units[None], counts.to(slots)]
        totals, number, whole = all_reduce_sum(world, torch.cat(parts)).cpu().split([len(part) for part in parts])
        seen, counts = int(number), whole.long()
        sums = (add_exactly(row) / seen if seen else nan for row in totals.view_as(slots).tolist())
        means = dict(zip(("loss", *self.sums), sums, strict=True))
        if self.global_loss:
            means["loss"] = self._evaluate_global_loss(model, loader, world, batch_size, own)
        figures = self.metrics(counts, max(1, seen)) | self.figures(means) | own.meter.reduce(world, self.moved)
        return Evaluation({"loss": means["loss"]} | figures, loader.size, self.details(counts))

    def run_passes(self, world: World, passes: Iterator[Result]) -> list[Result]:
        """Return what `passes` yields on this rank; all ranks call it together, and `meet` after some passes.

        An error that one rank raises in a pass, all raise; with `equal_passes` it does so alone, as others wait for it.
        """
        results: list[Result] = []
        done, count = 0, sys.maxsize if self.meet is None else 1
        while count:
            part = partial(_take, passes, count)
            new = part() if self.equal_passes else run_on_all_ranks(world, part)
            results.extend(new)
            done += count
            count = 0 if self.meet is None else self.meet(done, len(new) == count)
        return results

    def _measure_batches(
        self, model: nn.Module, loader: Loader, world: World, precision: Precision, batch_size: int, own: "_RankSums"
    ) -> Iterator[None]:
        """Add this rank's batches to its sums, one in each pass."""
        # made here, within a pass: it may not fit, and other ranks must hear of that
        slots = own.slots = torch.zeros(1 + len(self.sums), own.batches, dtype=torch.float64, device=world.device)
        done, meter = 0, own.meter
        seed = getattr(loader, "seed", 0)  # a task's own loader may lack it
        for done, batch in enumerate(loader.eval_batches(batch_size, world.rank, world.size), 1):
            seed_micro_batch(seed, EVAL_EPOCH, batch.micro_batch_index, world.device)
            # a model may change buffers without asking for its mode: the previous batch may be another worker's
            with precision.autocast(), meter.record(model), preserve_buffers(model):
                measured = self.measure(model, batch)
            meter.add(batch.micro_batch_index, len(batch), partial(self.pair_with_targets, batch=batch))
            slots[0, batch.micro_batch_index] = measured.loss_sum
            if measured.columns is not None:
                own.columns[batch.micro_batch_index] = measured.columns
            if measured.sums is not None:
                slots[1:, batch.micro_batch_index] = measured.sums
            own.units += self.units(batch)
            own.counts = measured.counts if own.counts is None else own.counts + measured.counts
            self.batch_evaluated(done)
            yield
        # every rank has to know the shapes of a global loss's rows, also one without a batch
        most = -(-slots.shape[1] // world.size) if self.equal_passes else int(self.global_loss is not None)
        for _ in range(most - done):
            with precision.autocast(), preserve_buffers(model):  # counts for nothing
                self.measure(model, next(loader.eval_batches(batch_size, 0, 1)))
            yield

    def _evaluate_global_loss(
        self, model: nn.Module, loader: Loader, world: World, batch_size: int, own: "_RankSums"
    ) -> float:
        """Return the mean loss of groups of samples; the ranks call it together, once all batches are measured."""
        assert self.global_loss is not None
        parts = {index * batch_size: columns for index, columns in own.columns.items()}
        group, sums, seed = self.group_size or loader.size, [], getattr(loader, "seed", 0)
        with eval_mode(model):
            losses = self.global_loss.evaluate(model, world, parts, group, samples=loader.size, seed=seed)
            for loss_sum in losses:
                sums.append(loss_sum)
                self.moved()
        return add_exactly(sums) / loader.size


def _take(passes: Iterator[Result], count: int) -> list[Result]:
    return list(islice(passes, count))


@dataclass
class _RankSums:
    """The sums of one rank over its batches of an evaluation."""

    batches: int  # of all ranks
    meter: MetricMeter
    slots: Tensor = torch.empty(0)  # (1 + sums, batches) float64, zero for those of other ranks; made in the first pass
    counts: Tensor | None = None  # (k,) int64; None without a batch
    units: Tensor | int = 0  # () int64, in the batches so far
    columns: dict[int, Columns] = field(default_factory=dict)  # of each batch, for a `global_loss`


class LossNormalizer:
    """Counts the units of each step on the device, and says what its gradient is multiplied by for the mean over them.

    The number is known only when all workers have fetched their samples, so losses are divided by the expected number,
    and gradients are corrected once they are reduced. With samples as units there is nothing to correct. `last` has the
    units of the last step, over all workers.
    """

    def __init__(self, task: Task, world: World) -> None:
        self._task, self._world = task, world
        self.last: Tensor | int = 0
        self._seen, self._samples = torch.zeros((), dtype=torch.int64, device=world.device), 0

    def divisor(self, samples: int) -> int:
        """The expected number of units, by which a step's loss is divided before backward."""
        return samples * self._task.units_per_sample

    def count_units(self, counted: Iterable[Tensor | int], samples: int) -> Tensor | None:
        """Return, at a step's end, the factor () float64 that scales the reduced gradient to the real number of units.

        None if there is nothing to correct. The factor of a step without units is not finite, so the optimizer skips
        that step: momentum and decay would move the weights. `counted` are the units of this worker's micro-batches,
        `samples` the samples of the step over all workers.
        """
        self.last = samples
        if self._task.unit == "sample":
            return None
        local = torch.zeros((), dtype=torch.int64, device=self._world.device)
        for count in counted:
            local += count
        self.last = all_reduce_sum(self._world, local)
        self._seen, self._samples = self._seen + self.last, self._samples + samples
        return self.divisor(samples) / self.last.double()

    def get_step_norm(self, norm: Tensor) -> Tensor:
        """Return the gradient norm () of the last step as it is shown to users: 0 if the step had no units."""
        return norm if isinstance(self.last, int) else torch.where(self.last > 0, norm, 0.0)

    def rate(self, samples_per_second: float) -> dict[str, float]:
        """For example `tokens_per_second` since the last call; {} if units are samples or weights."""
        if self._task.unit in ("sample", "weight") or not self._samples:
            return {}
        per_sample = float(self._seen) / self._samples
        self._seen, self._samples = torch.zeros_like(self._seen), 0
        return {f"{self._task.unit}s_per_second": samples_per_second * per_sample}
