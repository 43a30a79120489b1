"""The metrics of --metric: built-in ones, the user's own, torchmetrics'; by sums, by updates or by a function."""

import inspect
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.capabilities import METRICS
from multigpu_cli.config.code_names import NamedCode, parse_metric
from multigpu_cli.config.schema import MetricConfig
from multigpu_cli.data.collate import describe_shapes
from multigpu_cli.data.loader import first_batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import (
    World,
    all_reduce_max,
    all_reduce_sum,
    receive_object,
    run_in_step,
    run_on_all_ranks,
    send_object,
)
from multigpu_cli.errors import RequestError, TrainingError, did_you_mean
from multigpu_cli.monitor.meters import add_exactly
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.runtime.factories import bind_call, call_factory, find_factory, name_own_code
from multigpu_cli.runtime.module_state import eval_mode
from multigpu_cli.tasks.base import BatchMetrics, Task
from multigpu_cli.tasks.metric import Metric, MetricMeter, Moved, to_tensor

_SAME_LENGTH = "a tensor (k,), with the same k for every batch, of sums over the samples of the batch"
_MESSAGE = 2**22  # bytes; batches are sent together up to about twice that


class SummedMetric(Metric):
    """An object with `sums(outputs, targets)`, (k,) for a batch, and `compute` of their sum over the split.

    Whole numbers are added as int64. Others have a slot for each batch, and the slots are added without rounding, as
    float64.
    """

    def begin(self, batches: int, world: World) -> None:
        self._object, self._batches = self._own_code(), batches
        self._whole: Tensor | None = None  # (k,) int64
        self._parts: dict[int, Tensor] = {}  # (k,) float64, by the number of the batch

    def add(self, number: int, outputs: Any, targets: Any, samples: int) -> None:
        with name_own_code(f"{self.label}: sums"):
            found = self._object.sums(outputs, targets)
        sums, before = to_tensor(found), self._whole if self._whole is not None else next(iter(self._parts.values()), 0)
        same = isinstance(before, int) or (sums is not None and sums.shape == before.shape)
        if sums is None or sums.ndim != 1 or not same or sums.is_complex():
            raise TrainingError(f"{self.label}: sums returned {describe_shapes(found)}", remedy=_SAME_LENGTH)
        if sums.is_floating_point():
            self._parts[number] = sums.double()
        else:
            self._whole = sums.long() if self._whole is None else self._whole + sums

    def reduce(self, world: World, moved: Moved) -> float:
        known = self._whole if self._whole is not None else next(iter(self._parts.values()), None)
        own = 0 if known is None else known.numel()
        other = -own if own else -inf  # the shortest, as a maximum; a rank without batches has none
        size, shortest, real, whole = all_reduce_max(world, [own, other, bool(self._parts), self._whole is not None])
        if -shortest < size:
            problem = f"{self.label}: sums returned {-shortest:.0f} numbers for some batches and {size:.0f} for others"
            raise TrainingError(problem, remedy=_SAME_LENGTH)
        if real and whole:
            raise TrainingError(f"{self.label}: sums returned whole numbers for some batches only", remedy="one type")
        if real:
            slots = torch.zeros(int(size), self._batches, dtype=torch.float64, device=world.device)
            for number, part in self._parts.items():
                slots[:, number] = part
            added = [add_exactly(row) for row in all_reduce_sum(world, slots).tolist()]
            sums = torch.tensor(added, dtype=torch.float64)
        else:
            whole_sums = torch.zeros(int(size), dtype=torch.int64) if self._whole is None else self._whole
            sums = all_reduce_sum(world, whole_sums.to(world.device)).cpu()
        return self.compute_on_main_rank(world, lambda: self._object.compute(sums))


class OrderedMetric(Metric):
    """An object with `update(outputs, targets)`, called on rank 0 for each batch in order, and `compute()`.

    What the object keeps is its own affair, so any such class is exact: also torchmetrics', whose own exchange between
    processes is turned off. Outputs and targets come in host memory. The other ranks keep theirs until the pass ends,
    and send them to rank 0, several batches at once.
    """

    def begin(self, batches: int, world: World) -> None:
        self._object, self._batches, self._is_main = self._own_code(), batches, world.is_main
        for part in self._object.modules() if hasattr(self._object, "modules") else ():
            if hasattr(part, "distributed_available_fn"):  # torchmetrics', which would wait for the other ranks
                part.distributed_available_fn = lambda: False
        self._own: list[Any] = []

    def add(self, number: int, outputs: Any, targets: Any, samples: int) -> None:
        pair = [self._copy_to_host(part) for part in (outputs, targets)]
        if self._is_main:  # rank 0 has the first block of batches
            self._update(pair)
        else:
            self._own.append(pair)

    def reduce(self, world: World, moved: Moved) -> float:
        error: TrainingError | None = None
        count = 1
        while self._own:
            sent = send_object(world, self._own[:count])
            del self._own[:count]
            moved()
            count *= 2 if sent < _MESSAGE else 1
        for source in range(1, world.size if self._is_main else 1):
            left = self._batches * (source + 1) // world.size - self._batches * source // world.size
            while left:
                pairs = receive_object(world, source)
                left -= len(pairs)
                moved()
                try:
                    for pair in pairs if error is None else ():
                        self._update(pair)
                except TrainingError as caught:  # raised below, once the others have sent theirs
                    error = caught

        def compute() -> Any:
            if error:
                raise error
            return self._object.compute()

        return self.compute_on_main_rank(world, compute)

    def _update(self, pair: list[Any]) -> None:
        with name_own_code(f"{self.label}: update"):
            self._object.update(*pair)

    def _copy_to_host(self, value: Any) -> Any:
        """Tensors and plain values, which alone can be sent; in a tuple, list or dict as the model returned them."""
        if isinstance(value, Tensor):
            return value.detach().cpu()
        if isinstance(value, Mapping):
            return {str(name): self._copy_to_host(entry) for name, entry in value.items()}
        if isinstance(value, tuple | list):
            return [self._copy_to_host(entry) for entry in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        problem = f"{self.label}: the outputs hold a {type(value).__name__}, which can't be sent to rank 0"
        raise TrainingError(problem, remedy="a function of outputs and targets with one value for each sample")


class PerSampleMetric(Metric):
    """The mean of one value for each sample, or the sum of numerators over the sum of denominators.

    Each batch is summed in float64 into a slot of its own, which one worker fills; the slots are added without rounding
    (Shewchuk's fsum). So the bits do not depend on the number of workers.
    """

    def begin(self, batches: int, world: World) -> None:
        self._slots = torch.zeros(2, batches, dtype=torch.float64, device=world.device)

    def add(self, number: int, outputs: Any, targets: Any, samples: int) -> None:
        with name_own_code(f"{self.label}: it"):
            found = self._own_code(outputs, targets)
        parts = found if isinstance(found, tuple) and len(found) == 2 else (found,)
        for row, part in zip(self._slots, parts, strict=False):
            row[number] = self._check_shape(part, found, samples).double().sum()
        if len(parts) == 1:
            self._slots[1, number] = samples

    def _check_shape(self, part: Any, found: Any, samples: int) -> Tensor:
        values = to_tensor(part)
        if values is None or values.shape != (samples,) or values.is_complex():
            raise TrainingError(
                f"{self.label}: it returned {describe_shapes(found)} for {samples} samples",
                remedy="one value for each sample, (n,), or a pair of numerators and denominators, each (n,); for what "
                "is no mean over samples a class with update and compute",
            )
        return values

    def reduce(self, world: World, moved: Moved) -> float:
        numerators, denominators = all_reduce_sum(world, self._slots).tolist()
        whole = add_exactly(denominators)
        return add_exactly(numerators) / whole if whole else nan  # where no sample has a share


_LIBRARY = "torchmetrics"
_KINDS = {"classification": "multiclass", "multi-label": "multilabel"}  # torchmetrics' words for our tasks


def load_metrics(config: MetricConfig, source: DataSource, task: str) -> list[Metric]:
    """The metrics in their order; the classes of the source are offered to a class's constructor."""
    entries = [parse_metric(text) for text in config.names]
    return [_load(entry, config.args.get(entry.name, {}), source, task) for entry in entries]


def _load(entry: NamedCode, args: dict[str, Any], source: DataSource, task: str) -> Metric:
    name, code = entry
    flag = f"--metric {code}"
    of_library = code.partition(":")[0].split(".")[0] == _LIBRARY
    if of_library and find_spec(_LIBRARY) is None:
        raise RequestError(f"{flag}: the package {_LIBRARY} is not installed", remedy=f"pip install {_LIBRARY}")
    found = find_factory(code, METRICS, flag="--metric")
    if not inspect.isclass(found):
        problem = f"{flag}: it can't be called with outputs, targets{''.join(f', {name}=' for name in args)}"
        remedy = "function(outputs, targets, …), and metric.args.NAME for its other parameters"
        return PerSampleMetric(name, code, bind_call(found, 2, args, problem=problem, remedy=remedy))
    offered: dict[str, Any] = {"num_classes": source.num_classes, "class_names": source.class_names}
    if of_library:
        offered |= {"task": _KINDS.get(task), "num_labels": source.num_outputs} if task in _KINDS else {}
    make = partial(call_factory, found, offered, args, where="metric")
    kind = _choose_kind(found, flag)
    make()  # arguments that do not fit are refused now
    return kind(name, code, make)


def _choose_kind(found: type, flag: str) -> type[SummedMetric] | type[OrderedMetric]:
    if not callable(getattr(found, "compute", None)):
        raise RequestError(f"{flag}: the class has no method compute", remedy="compute, with update or sums")
    if callable(getattr(found, "sums", None)):
        return SummedMetric
    if callable(getattr(found, "update", None)):
        return OrderedMetric
    remedy = "update(outputs, targets), which sees each batch in order, or sums(outputs, targets), a tensor (k,)"
    raise RequestError(f"{flag}: the class has neither a method update nor sums", remedy=remedy)


class Metrics(Part):
    """The metrics of --metric, and the number of --best."""

    def __init__(self, spec: RunSpec, world: World) -> None:
        self._config = config = spec.config.metric
        self._own = run_on_all_ranks(world, lambda: load_metrics(config, spec.source, spec.task))

    def task_built(self, task: Task) -> None:
        task.own_metrics = self._own

    def plan_notes(self) -> dict[str, str | list[str]]:
        entries, best = map(parse_metric, self._config.names), self._config.best
        said = [", ".join(f"{name} ({code})" if ":" in code else name for name, code in entries)]
        if best is not None:
            name, _, which = best.partition(":")
            said.append(f"the best weights have the {'greatest' if which == 'max' else 'lowest'} {name}")
        return {"metrics": "; ".join(filter(None, said))}

    def built(self, components: TrainComponents) -> None:
        if self._config.best is not None:
            components.score = self._score
        _check_metrics(components)

    def _score(self, metrics: dict[str, float]) -> list[float]:
        best = str(self._config.best)
        _check_best_name(best, list(metrics))  # a task that evaluates in its own way did not say them before
        name, _, which = best.removeprefix("val_").partition(":")
        return [metrics[name] if which == "max" else -metrics[name]]


def _check_metrics(components: TrainComponents) -> None:
    """Evaluate one small batch with the metrics, and compare names; all ranks call it together.

    `compute` is not called: many a number has no value for two samples.
    """
    config, loaders = components.config.metric, components.loaders
    if config.best and loaders.val is None:
        raise RequestError(f"--best {config.best}: the data has no validation split", remedy="leave it out")
    if loaders.val is None and loaders.test is None:
        raise RequestError(f"--metric {config.names[0]}: the data has neither a validation nor a test split")
    if not components.evaluates_in_batches:
        if config.names:
            raise RequestError(
                f"--metric {config.names[0]}: --task {components.spec.task} evaluates in its own way, not outputs "
                "against targets",
                remedy="leave it out; --best knows the task's own numbers",
            )
        return  # its numbers are known after the first evaluation
    names = _try_metrics(components)
    if config.best:
        _check_best_name(config.best, names)


def _check_best_name(best: str, names: list[str]) -> None:
    """Refuse a --best that names none of the numbers of an evaluation."""
    name, known = best.partition(":")[0], sorted(f"val_{each}" for each in names)
    if name not in known:
        near = did_you_mean(name, known) if name not in names else f"did you mean 'val_{name}'?"
        remedy = near if near.startswith("one of") else f"{near} ({', '.join(known)})"
        raise RequestError(f"--best {best}: an evaluation has no {name!r}", remedy=remedy)


def _try_metrics(components: TrainComponents) -> list[str]:
    """The names of the numbers that an evaluation gives."""
    task, model, world = components.task, components.state.model, components.world
    meter, batch = MetricMeter(task.own_metrics, 1, world), first_batch(components.loaders.train, 2)
    run = run_in_step if components.strategy.sharded else run_on_all_ranks

    def measure() -> BatchMetrics:
        with eval_mode(model), components.state.precision.autocast(), meter.record(model):
            return task.measure(model, batch)

    measured = run(world, measure)

    def count() -> None:
        with eval_mode(model):
            try:
                meter.add(0, len(batch), lambda outputs: task.pair_with_targets(outputs, batch))
            except TrainingError as error:
                raise RequestError(error.problem, remedy=error.remedy) from error

    run_on_all_ranks(world, count)
    own = [metric.name for metric in task.own_metrics]
    known = ["loss", *task.metrics(measured.counts.cpu(), max(1, int(task.units(batch))))]
    known += task.figures(dict.fromkeys(("loss", *task.sums), nan))
    if taken := [name for name in own if name in known]:
        problem = f"--metric {taken[0]}: --task {components.spec.task} gives {taken[0]!r} already"
        raise RequestError(problem, remedy=f"leave it out, or --metric NAME={taken[0]}")
    return [*known, *own]
