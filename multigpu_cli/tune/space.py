"""The search space: which settings vary, between what, and under which condition; without torch and Optuna."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from multigpu_cli.config.schema import LENGTH
from multigpu_cli.config.yaml_text import UnreadableError, compose, parse_plain, parse_typed
from multigpu_cli.errors import RequestError, did_you_mean

Params = dict[str, Any]  # one trial's settings by key, without those whose condition does not hold
KINDS = ("range", "int", "log", "choice")
OWNED = {"save_dir", "resume", "best", "tune.pause_at", "multi_gpu", "nproc_per_node", "gpu_ids", "seed", *LENGTH}
_FORM = re.compile(r"(\w+)\((.*)\)(?::(\d+))?(?:\s+when\s+([\w.]+)\s*=\s*(.+))?", re.DOTALL)
_OTHER_NAMES = {"uniform": "range", "float": "range", "loguniform": "log", "randint": "int", "categorical": "choice"}
_EXAMPLE = "lr=log(1e-4,1e-1), model.args.width=choice(16,32), KEY=range(0,0.5) or KEY=int(1,9)"


@dataclass(frozen=True)
class Dimension:
    """One setting that varies."""

    key: str
    kind: str
    text: str  # the expression as the user wrote it
    values: tuple[Any, ...]  # of a choice; else the two ends
    points: int = 0  # of a grid; 0 where none are given
    parent: str = ""  # the setting that must have one of the `wanted` values; "" if there is no condition
    wanted: tuple[Any, ...] = ()

    def holds(self, params: Params) -> bool:
        """Whether its condition does."""
        return not self.parent or params[self.parent] in self.wanted

    def contains(self, value: Any) -> bool:
        """Return whether a trial may have this value; the ends of a grid are met up to rounding."""
        if self.kind == "choice":
            return any(type(value) is type(each) and value == each for each in self.values)
        low, high = self.values
        return type(value) in (int, float) and low - 1e-9 * abs(low) <= value <= high + 1e-9 * abs(high)

    def grid(self) -> Sequence[Any]:
        """Its points: all of a choice or of a few whole numbers, or `points` of them from one end to the other."""
        if self.kind == "choice":
            return self.values
        low, high = self.values
        if not self.points and self.kind == "int" and high - low < 1000:
            return range(low, high + 1)
        if not self.points:
            example = f"--search '{self.key}={self.kind}({low},{high}):5' for five of them"
            raise RequestError(f"--sampler grid: {self.key} has no number of points", remedy=example)
        shares = [at / max(1, self.points - 1) for at in range(self.points)]
        found = [low * (high / low) ** each if self.kind == "log" else low + (high - low) * each for each in shares]
        return list(dict.fromkeys(map(round, found))) if self.kind == "int" else found


def parse_search(texts: Sequence[str]) -> list[Dimension]:
    """The dimensions of KEY=EXPR texts and of YAML files, by name, those with a condition last; or a RequestError."""
    found: dict[str, Dimension] = {}
    for key, text in (entry for each in texts for entry in _read_entries(each)):
        if key in found:
            raise RequestError(f"--search {key}: it is given twice", remedy="one of them")
        found[key] = _parse_dimension(key, text)
    if not found:
        raise RequestError("tune needs --search: it says which settings vary", remedy=f"--search {_EXAMPLE}")
    for each in found.values():
        parent = found.get(each.parent)
        if each.parent and (parent is None or parent.kind != "choice" or parent.parent):
            problem = f"--search {each.key}: {each.parent} must be a choice without a condition of its own"
            raise RequestError(problem, remedy=f"--search '{each.parent}=choice(…)'")
        if parent and (unknown := [value for value in each.wanted if value not in parent.values]):
            raise RequestError(f"--search {each.key}: {each.parent} is never {unknown[0]}", remedy=parent.text)
    return sorted(found.values(), key=lambda each: (bool(each.parent), each.key))


def _read_entries(text: str) -> Iterator[tuple[str, str]]:
    key, equals, expression = text.partition("=")
    if equals:
        yield key.strip(), expression.strip()
        return
    try:
        node = compose(Path(text).read_text())
        if node is None or not isinstance(found := parse_plain(node), dict):
            raise UnreadableError("not lines of KEY: EXPR", 1)
        yield from ((key, str(value)) for key, value in found.items())
    except (OSError, UnicodeDecodeError, UnreadableError) as error:
        problem = f"--search {text}: neither KEY=EXPR nor a YAML file of them ({getattr(error, 'problem', error)})"
        raise RequestError(problem, remedy=_EXAMPLE) from error


def _parse_dimension(key: str, text: str) -> Dimension:
    label, form = f"--search {key}={text}", _FORM.fullmatch(text)
    if key in OWNED:
        raise RequestError(f"--search {key}: the study itself decides it", remedy="another setting")
    if not form or form[1] not in KINDS:
        near = ": a bracket is missing" if text.count("(") != text.count(")") else ""
        near = f": {did_you_mean(_OTHER_NAMES.get(form[1], form[1]), KINDS)}" if form else near
        known = form and _OTHER_NAMES.get(form[1])
        raise RequestError(f"{label}: is no expression{near}", remedy=f"{key}={known}(…)" if known else _EXAMPLE)
    kind, inner, points, parent, wanted = form.groups()
    values = _parse_values(inner, label)
    if kind == "choice" and (points or not values or len(set(map(repr, values))) < len(values)):
        raise RequestError(f"{label}: needs different values, and no number of points", remedy=f"{key}=choice(a,b)")
    if kind != "choice":
        numbers = [value for value in values if type(value) in ((int,) if kind == "int" else (int, float))]
        if len(values) != 2 or len(numbers) != 2 or not 0 < numbers[1] - numbers[0] < math.inf:
            kinds = "whole numbers" if kind == "int" else "numbers"
            raise RequestError(f"{label}: needs two {kinds}, the greater one last", remedy=f"{key}={kind}(1,10)")
        if kind == "log" and numbers[0] <= 0:
            raise RequestError(f"{label}: a logarithm begins above 0", remedy=f"{key}=log(1e-4,…)")
    given = _parse_values(wanted, label) if parent else ()
    return Dimension(key, kind, text, values, int(points or 0), parent or "", given)


def _parse_values(inner: str, label: str) -> tuple[Any, ...]:
    try:
        values = parse_typed(compose(f"[{inner}]"))  # type: ignore[arg-type]
    except UnreadableError as error:
        raise RequestError(f"{label}: {error.problem}", remedy="words in quotes") from error
    if any(isinstance(value, list | dict) for value in values):
        raise RequestError(f"{label}: may hold words and numbers only", remedy="a name for each list, in your code")
    return tuple(values)


def list_points(space: Sequence[Dimension], *, grid: bool = False) -> Iterator[Params]:
    """Every combination of the ends and choices, or of the points of a grid; the last name turns fastest."""
    seen = set()
    for point in product(*(each.grid() if grid else each.values for each in space)):
        params = keep_active(space, {each.key: value for each, value in zip(space, point, strict=True)})
        if (mark := repr(params)) not in seen:
            seen.add(mark)
            yield params


def check_params(space: Sequence[Dimension], params: Params) -> None:
    """Raise ValueError unless these are settings of the space, each within its range.

    They become settings of a run, and a file that names others may be a stranger's: `notify` names a program.
    """
    expected = {each.key: each for each in space if each.holds({each.parent: None} | params)}
    for key in params.keys() ^ expected.keys():
        raise ValueError(f"params: {key} is {'not varied by the study' if key in params else 'missing'}")
    for key, each in expected.items():
        if not each.contains(params[key]):
            raise ValueError(f"params: {key}={params[key]!r} is not of {each.text}")


def keep_active(space: Sequence[Dimension], params: Params) -> Params:
    """Without the settings whose condition does not hold."""
    return {each.key: params[each.key] for each in space if each.holds(params)}


def list_corners(space: Sequence[Dimension], most: int) -> list[Params]:
    """Return all corners if there are at most `most`; otherwise a point for each value of each setting."""
    if math.prod(len(each.values) for each in space) <= most:
        return list(list_points(space))
    first, found = {each.key: each.values[0] for each in space}, []
    for each in space:
        given = {each.parent: each.wanted[0]} if each.parent else {}
        found += [keep_active(space, {**first, **given, each.key: value}) for value in each.values]
    return [params for at, params in enumerate(found) if params not in found[:at]]


def find_place(each: Dimension, params: Params) -> float:
    """Return the position of a trial on the axis of a setting, from 0 to 1; NaN if it does not have the setting."""
    value = params.get(each.key, math.nan)
    if each.kind == "choice":
        return each.values.index(value) / max(1, len(each.values) - 1) if each.key in params else math.nan
    low, high = each.values
    return math.log(value / low) / math.log(high / low) if each.kind == "log" else (value - low) / (high - low)
