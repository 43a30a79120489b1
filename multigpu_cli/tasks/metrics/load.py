"""Makes the metrics that --metric names: built-in ones, the user's own, torchmetrics'."""

import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from multigpu_cli.config.named_code import NamedCode, parse_metric
from multigpu_cli.config.schema import MetricConfig
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.factories import call_factory, find_factory
from multigpu_cli.tasks.metrics.base import Metric
from multigpu_cli.tasks.metrics.in_order import OrderedMetric
from multigpu_cli.tasks.metrics.per_sample import PerSampleMetric
from multigpu_cli.tasks.metrics.registry import METRICS
from multigpu_cli.tasks.metrics.summed import SummedMetric

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
        return PerSampleMetric(name, code, _bind(found, flag, args))
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


def _bind(function: Callable[..., Any], flag: str, args: dict[str, Any]) -> Callable[[Any, Any], Any]:
    """The function of outputs and targets, with its other arguments."""
    try:
        inspect.signature(function).bind(None, None, **args)
    except TypeError as error:
        raise RequestError(
            f"{flag}: it can't be called with outputs, targets{''.join(f', {name}=' for name in args)}: {error}",
            remedy="function(outputs, targets, …), and metric.args.NAME for its other parameters",
        ) from error
    return partial(function, **args)
