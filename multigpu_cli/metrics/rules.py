"""The rules of --metric, beside what only an import shows."""

from collections.abc import Iterator

from multigpu_cli.capabilities import METRICS
from multigpu_cli.config.code_names import find_entry_errors, parse_metric
from multigpu_cli.config.rules import Rule
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, did_you_mean

_TAKEN = {"event", "time", "epoch", "step", "split", "samples", "loss"}  # fields of an `eval` line


def _metrics(config: Config) -> Iterator[RequestError]:
    entries = [parse_metric(text) for text in config.metric.names]
    for name, code in entries:
        if ":" not in code and code not in METRICS:
            remedy = f"{did_you_mean(code, METRICS)} (or your own as module:function)"
            yield RequestError(f"--metric {code}: unknown name", remedy=remedy)
        elif name in _TAKEN:
            yield RequestError(f"--metric {code}: {name!r} is already in use", remedy=f"--metric NAME={code}")
    yield from find_entry_errors("metric", entries, config, "function")


RULES = (Rule("metric metric.args", _metrics),)
