"""Makes the metrics that --metric names: built-in ones, the user's own, torchmetrics'."""

import inspect
from functools import partial
from importlib.util import find_spec
from math import nan
from typing import Any

from multigpu_cli.capabilities import METRICS
from multigpu_cli.config.code_names import NamedCode, parse_metric
from multigpu_cli.config.schema import MetricConfig
from multigpu_cli.data.loader import first_batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.collectives import run_in_step, run_on_all_ranks
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, TrainingError, did_you_mean
from multigpu_cli.metrics.kinds import OrderedMetric, PerSampleMetric, SummedMetric
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.runtime.factories import bind_call, call_factory, find_factory
from multigpu_cli.runtime.module_state import eval_mode, preserve_buffers
from multigpu_cli.tasks.base import BatchMetrics, Task
from multigpu_cli.tasks.metric import Metric, MetricMeter

_LIBRARY = "torchmetrics"
_KINDS = {"classification": "multiclass", "multi-label": "multilabel"}  # torchmetrics' words for our tasks


def load_metrics(config: MetricConfig, source: DataSource, task: str) -> list[Metric]:
    """The metrics in their order.

    Args:
        source: its classes are offered to a class's constructor.
        task: the task's name.

    Raises:
        RequestError: there is no such code, it is no metric, or its arguments do not fit.
    """
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
    raise RequestError(
        f"{flag}: the class has neither a method update nor sums",
        remedy="update(outputs, targets), which sees each batch in order, or sums(outputs, targets), a tensor (k,)",
    )


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

    Raises:
        RequestError: a metric can't be computed here, or --best names none; the same on every rank.
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
    """Whether an evaluation gives the number that --best names.

    Args:
        names: the numbers of an evaluation.

    Raises:
        RequestError: it does not.
    """
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
        with eval_mode(model), preserve_buffers(model), components.state.precision.autocast(), meter.record(model):
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
        raise RequestError(
            f"--metric {taken[0]}: --task {components.spec.task} gives {taken[0]!r} already",
            remedy=f"leave it out, or --metric NAME={taken[0]}",
        )
    return [*known, *own]
