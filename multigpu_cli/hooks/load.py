"""Imports and checks the classes that --hook names, before anything is written."""

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from multigpu_cli.config.code_names import NamedCode, parse_hook
from multigpu_cli.config.schema import HookConfig
from multigpu_cli.config.types import quote_value
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.runtime.factories import bind_call, find_factory

TENSORS = ("after_backward", "step_end")
"""Methods that also get named tensors."""
METHODS = ("start", *TENSORS, "evaluated", "epoch_end", "saved", "end", "failed")
_STATE = ("state_dict", "load_state_dict")
_LIKE = 0.8  # of a known name, above which another one is taken for a misspelling of it
_BUDGET_MS = 100.0


@dataclass
class Hook:
    """A class of --hook that was checked, and this rank's object.

    Attributes:
        name: of its arguments and its state.
        factory: the class.
        args: of its constructor.
        methods: those of METHODS that it has.
        ranks: where it wants to be; None: everywhere.
        every: after_backward and step_end are called in each `every`-th step.
        budget_ms: milliseconds of a call beyond which there is a warning.
        has_state: it has state_dict and load_state_dict.
        object: None before it is made, and where this rank wants none.
        warned: of its budget.
    """

    name: str
    code: str
    factory: type
    args: dict[str, Any]
    methods: tuple[str, ...]
    ranks: tuple[int, ...] | None
    every: int
    budget_ms: float
    has_state: bool
    object: Any = None
    warned: bool = False

    def describe(self, world_size: int) -> str:
        """What the plan says of it."""
        where = "on all ranks" if self.ranks is None else f"on rank {', '.join(map(str, self.ranks))}"
        where += ", which is not there" if self.ranks and min(self.ranks) >= world_size else ""
        steps = f"; each {self.every} steps" if self.every > 1 and set(TENSORS) & set(self.methods) else ""
        return f"{self.code}, {where}: {', '.join(self.methods)}{steps}"

    def first_rank(self, world: World) -> int | None:
        """The lowest rank that has one, whose state checkpoints hold; None if none has."""
        there = range(world.size) if self.ranks is None else [rank for rank in self.ranks if rank < world.size]
        return min(there, default=None)

    def is_due(self, method: str, step: int) -> bool:
        """Whether a method is called in this step, counted from 1."""
        return method in self.methods and (method not in TENSORS or step % self.every == 0)


def load_hooks(config: HookConfig) -> list[Hook]:
    """The classes in the order in which they are called.

    Raises:
        RequestError: there is no such class, or it is no hook.
    """
    entries = [parse_hook(text) for text in config.names]
    return [_load(entry, config.args.get(entry.name, {})) for entry in entries]


def _load(entry: NamedCode, args: dict[str, Any]) -> Hook:
    flag, found = f"--hook {entry.code}", find_factory(entry.code, {}, flag="--hook")
    if not inspect.isclass(found):
        raise RequestError(f"{flag}: it is a {type(found).__name__}, not a class", remedy="name a class")
    methods = tuple(name for name in METHODS if callable(getattr(found, name, None)))
    _refuse_misspelt(found, flag, methods)
    for name in methods:
        _check_signature(found, name, flag)
    state = [name for name in _STATE if callable(getattr(found, name, None))]
    if len(state) == 1:
        other = next(name for name in _STATE if name not in state)
        raise RequestError(f"{flag}: it has {state[0]}, and no {other}", remedy="both of them, or neither")
    return Hook(
        name=entry.name,
        code=entry.code,
        factory=found,
        args=args,
        methods=methods,
        ranks=_parse_ranks(getattr(found, "ranks", 0), flag),
        every=int(_parse_number(found, "every", 1, flag)),
        budget_ms=_parse_number(found, "budget_ms", _BUDGET_MS, flag),
        has_state=bool(state),
    )


def _refuse_misspelt(found: type, flag: str, methods: Collection[str]) -> None:
    """Refuse a method that is called almost like one of a hook, and a class that has none of these."""
    own = [name for name in dir(found) if not name.startswith("_") and callable(getattr(found, name))]
    for name in own:
        near = get_close_matches(name, (*METHODS, *_STATE), n=1, cutoff=_LIKE)
        if near and near[0] != name:
            raise RequestError(
                f"{flag}: it has a method {name!r}, which is never called",
                remedy=f"did you mean {near[0]!r}? (Or _{name}, if it is meant.)",
            )
    if not methods:
        has = f"; it has {', '.join(own[:8])}" if own else ""
        raise RequestError(f"{flag}: it has none of the methods of a hook{has}", remedy=f"one of: {', '.join(METHODS)}")


def _check_signature(found: type, name: str, flag: str) -> None:
    given = ("numbers", "tensors") if name in TENSORS else ("numbers",)
    if inspect.iscoroutinefunction(getattr(found, name)) or inspect.isgeneratorfunction(getattr(found, name)):
        raise RequestError(
            f"{flag}: a call of {name} would run nothing of it", remedy="a plain method, without async and yield"
        )
    bound = isinstance(inspect.getattr_static(found, name), staticmethod | classmethod)
    problem = f"{flag}: {name} does not take {pluralize(len(given), 'argument')}"
    remedy = f"def {name}(self, {', '.join(given)})"
    bind_call(getattr(found, name), len(given) + (not bound), {}, problem=problem, remedy=remedy)


def _parse_ranks(wanted: Any, flag: str) -> tuple[int, ...] | None:
    if isinstance(wanted, str) and wanted == "all":
        return None
    ranks = (wanted,) if isinstance(wanted, int) else tuple(wanted) if isinstance(wanted, tuple | list | range) else ()
    if not ranks or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks):
        raise RequestError(f"{flag}: its ranks are {quote_value(wanted)}", remedy="ranks = 'all', 0, or (0, 1)")
    return tuple(sorted(set(ranks)))


def _parse_number(found: type, name: str, default: float, flag: str) -> float:
    value = getattr(found, name, default)
    whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value > 0:
        kind = "a whole number of steps above 0" if whole else "milliseconds, above 0"
        raise RequestError(f"{flag}: its {name} is {quote_value(value)}", remedy=f"{name} = {kind}")
    return value
