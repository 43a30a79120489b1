"""How the mutants ended: kept one by one, so that a stopped run goes on, and summed up at the end."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.mutants.mutations import Mutation

EQUIVALENT = Path(__file__).with_name("equivalent.yaml")


class Result(NamedTuple):
    """How one mutant ended.

    Attributes:
        name: the mutation's.
        verdict: killed, timeout, survived, or broken (the tests could not run).
        by: the test that failed.
        tests: how many were chosen.
        seconds: of one processor that this took.
        diff: the mutation, to be read by people.
    """

    name: str
    verdict: str
    by: str
    tests: int
    seconds: float
    diff: str


def read_lines(kept: Path) -> list[dict[str, Any]]:
    """What `add_line` left; without a line that was torn when somebody ended us."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def add_line(kept: Path, found: Mapping[str, Any]) -> None:
    torn = kept.exists() and kept.read_text(encoding="utf-8")[-1:] not in {"", "\n"}
    with open(kept, "a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(found, ensure_ascii=False) + "\n")


class Results:
    """The results in a file of JSON lines; the last one of a mutant counts."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._found = {line["name"]: Result(**line) for line in read_lines(kept)}

    def add(self, result: Result) -> None:
        add_line(self._kept, result._asdict())
        self._found[result.name] = result

    def of(self, mutation: Mutation) -> Result | None:
        return self._found.get(mutation.name)


Key = tuple[str, str, str, str]


def key(mutation: Mutation) -> Key:
    """By texts, so that an entry holds for as long as the lines do, wherever they stand."""
    return mutation.file, mutation.place, mutation.before, mutation.after


def equivalents(file: Path = EQUIVALENT) -> dict[Key, str]:
    """The mutations that change nothing, each with the reason."""
    listed = yaml.safe_load(file.read_text(encoding="utf-8")) or []
    return {(one["file"], one["place"], one["before"], one["after"]): one["why"] for one in listed}


def interval(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if not of:
        return 0.0, 1.0
    z = 1.959964
    middle, half = hits + z * z / 2, z * sqrt(hits * (of - hits) / of + z * z / 4)
    return max(0.0, (middle - half) / (of + z * z)), min(1.0, (middle + half) / (of + z * z))


def summary(mutations: Sequence[Mutation], results: Results, known: dict[Key, str]) -> tuple[str, float]:
    """The text, and the share that survived of those that change something and were run."""
    same = [(number, one) for number, one in enumerate(mutations, 1) if key(one) in known]
    found = {number: results.of(one) for number, one in enumerate(mutations, 1) if key(one) not in known}
    verdicts = Counter(result.verdict if result else "not run" for result in found.values())
    ran = sum(verdicts[verdict] for verdict in ("killed", "timeout", "survived"))
    share, (low, high) = verdicts["survived"] / max(1, ran), interval(verdicts["survived"], ran)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    head = f"{len(mutations)} mutants: {counted}, {len(same)} equivalent"
    told = f"survived: {share:.1%} of {ran} (95 % interval {low:.1%} to {high:.1%})"
    return "\n".join([*_list_survivors(found), *_list_equivalents(same, known), head, told]), share


def _list_survivors(found: dict[int, Result | None]) -> Iterable[str]:
    for number, result in found.items():
        if result and result.verdict in {"survived", "broken"}:
            yield f"{number} {result.verdict}, {result.tests} tests: {result.diff}\n"


def _list_equivalents(same: Sequence[tuple[int, Mutation]], known: dict[Key, str]) -> Iterable[str]:
    for number, one in same:
        yield f"{number} equivalent, {known[key(one)]}: {one.diff()}\n"
