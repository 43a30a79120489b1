"""Rules by which a step merges the values that its micro-batches leave in a buffer.

The mean of the changes is right for running means and for counts. It is wrong for bounds (the least value so far), for
the last micro-batch's value, and for totals over samples: a model names another rule for such a buffer.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from multigpu_cli.errors import RequestError

_BOUNDS = {"min_val": "min", "max_val": "max"}
_OBSERVERS = ("MinMaxObserver", "PerChannelMinMaxObserver")
_OF_TORCH = {f"torch.ao.quantization.observer.{name}": _BOUNDS for name in _OBSERVERS}
"""Rules of torch's own classes. Those of their subclasses with moving averages are means."""

MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "last": lambda earlier, later: later,
}
"""Rules by which values merge; by the others, mean and sum, changes do."""

RULES = ("mean", "sum", *MERGES)


def find_rules(model: nn.Module) -> dict[str, str]:
    """Return the rules by full name of a buffer, from `buffer_rules` of the model's modules; others have the mean.

    `buffer_rules` maps patterns of buffer names (`*` is any text), relative to the module, to one of RULES. The first
    pattern that matches counts, and that of an outer module before that of an inner one. RequestError if a rule is
    unknown or does not suit the buffer, or if a pattern matches no buffer.
    """
    rules: dict[str, str] = {}
    for path, module in model.named_modules():
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if patterns := getattr(module, "buffer_rules", _OF_TORCH.get(kind)):
            for name, rule in _match(module, patterns).items():
                rules.setdefault(f"{path}.{name}" if path else name, rule)
    return rules


def _match(module: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """Return the rule of each buffer, by its name in the module."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    rules: dict[str, str] = {}
    for pattern, rule in patterns.items():
        entry = f"--model: buffer_rules of {type(module).__name__} has {pattern!r}: {rule!r}"
        names = [name for name in buffers if fnmatch(name, pattern)]
        if rule not in RULES:
            raise RequestError(f"{entry}, which is no rule", remedy=f"one of {', '.join(RULES)}")
        if not names:
            raise RequestError(f"{entry}, which matches no buffer", remedy=f"one of {', '.join(buffers) or 'none'}")
        if rule in ("min", "max") and any(buffers[name].is_complex() for name in names):
            raise RequestError(f"{entry}, but complex numbers have no order", remedy="mean, sum or last")
        for name in names:
            rules.setdefault(name, rule)
    return rules
