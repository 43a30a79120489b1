"""Which tests run a line: gathered once per test file, by running it unmutated."""

import ast
import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.copy import Copy
from tests.mutants.mutations import Mutation
from tests.mutants.results import add_line, read_lines

_RUNS = ("tests/run/", "tests/api/", "tests/gpu/simulated/", "tests/test_engine.py")
_NEAR = {
    "planning": (
        "tests/planning/",
        "tests/commands/plan/test_plan.py",
        "tests/optimizers/test_rate_factors.py",
        *_RUNS,
    ),
    "checkpoint": (
        "tests/checkpoint/",
        "tests/mirror/",
        "tests/commands/test_checkpoints.py",
        "tests/commands/inference/test_export.py",
        "tests/distributed/test_initial_weights.py",
        *_RUNS,
    ),
    "strategies": (
        "tests/strategies/",
        "tests/distributed/test_exact.py",
        "tests/distributed/test_gradients.py",
        "tests/distributed/test_sharded.py",
        "tests/distributed/test_sharded_exact.py",
        *_RUNS,
    ),
    "run": (
        "tests/hooks/",
        "tests/mirror/",
        "tests/loggers/",
        "tests/monitor/",
        "tests/faults/",
        "tests/config/",
        "tests/distributed/test_before_step_one.py",
        "tests/distributed/test_extra_state.py",
        "tests/distributed/test_optimizers.py",
        "tests/distributed/test_ppo.py",
        "tests/distributed/test_prompt_samples.py",
        "tests/optimizers/test_groups.py",
        "tests/optimizers/test_rate_factors.py",
        "tests/test_own_code.py",
        "tests/test_wrong_requests.py",
        *_RUNS,
    ),
    "hooks": ("tests/hooks/", "tests/test_own_code.py", "tests/config/test_named_code.py", *_RUNS),
    "freezing.py": ("tests/models/", "tests/optimizers/", *_RUNS),
    "metrics": ("tests/metrics/", "tests/tasks/", "tests/test_wrong_requests.py", *_RUNS),
    "mirror": ("tests/checkpoint/", "tests/mirror/", "tests/commands/test_mirror.py", *_RUNS),
    "engine.py": ("tests/hooks/", "tests/monitor/", "tests/faults/", "tests/test_train_multi_gpu.py", *_RUNS),
}
"""The test files (or folders of them) that may notice a fault in a room."""
_SHORT = 1.0  # the same of one test


class Chosen(NamedTuple):
    """The tests of one mutant: seconds that each may take, and those that come first."""

    limits: dict[str, float]
    first: list[str]


class Nearest:
    """What is known of the tests, kept in a file of JSON lines.

    Args:
        budget: seconds of one processor that the tests of one mutant may take while they are traced; without a fault
            and untraced it is about half of that.
    """

    def __init__(self, root: Path, kept: Path, budget: float) -> None:
        self._root, self._kept, self._budget = root, kept, budget
        self._lock = threading.Lock()
        self._known = {line["file"]: line for line in read_lines(kept)}

    def unknown(self, mutations: Iterable[Mutation]) -> list[str]:
        """The test files near these that are new or have changed since they were gathered."""
        near = tuple({path for mutation in mutations for path in _NEAR[_room(mutation)]})
        files = {
            file.relative_to(self._root).as_posix(): file for file in sorted(self._root.glob("tests/**/test_*.py"))
        }
        known = {name: self._known[name]["mark"] for name in files if name in self._known}
        return [name for name in files if name.startswith(near) and known.get(name) != _mark(files[name])]

    def gather(self, copy: Copy, name: str) -> list[str]:
        """Run a test file and keep what it reached; the tests that failed, which are never chosen."""
        told = copy.gather(name)
        if told.get("code") not in (0, 1, 5):  # nothing to run is fine
            raise RuntimeError(f"{name} cannot be run: {copy.log()[-3000:]}")
        failed = told["failed"]
        passed = {test: took for test, took in told["done"].items() if test not in failed}
        spans: dict[str, list[tuple[int, int, str]]] = {}
        reached: dict[str, set[str]] = defaultdict(set)
        for line in told["lines"]:
            test, file, number = line.split("\t")
            if file not in spans:
                spans[file] = _functions(ast.parse((copy.tree / file).read_text(encoding="utf-8")))
            if place := _place(spans[file], int(number)):
                reached[f"{file}:{place}"].add(test)
        known = {
            "file": name, "mark": _mark(copy.tree / name), "tests": passed,
            "reached": {place: sorted(tests) for place, tests in sorted(reached.items())},
        }  # fmt: skip
        with self._lock:
            add_line(self._kept, known)
            self._known[name] = known
        return list(failed)

    def choose(self, mutation: Mutation) -> Chosen:
        """The tests that run its lines, those of the file's own test file first, then the short ones; and the others
        of its own test file, since what an earlier test has cached is not run again."""
        own = own_tests(mutation.file)
        tests = self._reaching(mutation) | set(self._known.get(own, {"tests": {}})["tests"])
        ranked = sorted((not test.startswith(f"{own}::"), *self._took(test), test) for test in tests)
        chosen: dict[str, float] = {}
        spent = 0.0
        for _, cpu, clock, test in ranked:
            if spent + cpu <= self._budget or not chosen:
                chosen[test] = 30 + 5 * clock
                spent += cpu
        return Chosen(chosen, [test for test in chosen if self._took(test)[0] < _SHORT])

    def _reaching(self, mutation: Mutation) -> set[str]:
        """Of what runs at the import: the tests that run a method of its class, or else anything of its file."""
        exact = [f"{mutation.file}:{mutation.place}:{line}" for line in mutation.inside]
        wide = [f"{mutation.file}:{mutation.place}.", f"{mutation.file}:"] if mutation.place else [f"{mutation.file}:"]
        for prefix in [""] if exact else wide:
            found: set[str] = set()
            for name, known in self._known.items():
                if not name.startswith(_NEAR[_room(mutation)]):
                    continue
                reached = known["reached"]
                places = exact or [place for place in reached if place.startswith(prefix)]
                for test in {test for place in places for test in reached.get(place, ())}:
                    found |= set(known["tests"]) if test == name else {test} & set(known["tests"])
            if found:
                return found
        return set()

    def _took(self, test: str) -> tuple[float, float]:
        cpu, clock = self._known[test.partition("::")[0]]["tests"][test]
        return cpu, clock


def _mark(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _room(mutation: Mutation) -> str:
    return mutation.file.split("/")[1]


def own_tests(file: str) -> str:
    """multigpu_cli/run/step.py → tests/run/test_profile_micro_batch.py"""
    path = Path("tests", *Path(file).parts[1:])
    return path.with_name(f"test_{path.name}").as_posix()


def _functions(tree: ast.Module) -> list[tuple[int, int, str]]:
    """First and last line and qualified name of each function."""
    found: list[tuple[int, int, str]] = []

    def enter(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            below = within
            if isinstance(child, ast.ClassDef):
                below = f"{within}{child.name}."
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min(each.lineno for each in [child, *child.decorator_list])
                found.append((first, child.end_lineno or first, within + child.name))
                below = f"{within}{child.name}.<locals>."
            enter(child, below)

    enter(tree, "")
    return found


def _place(functions: Sequence[tuple[int, int, str]], line: int) -> str:
    """A line as "Class.function:3", counted from the innermost function's first; "" outside of all."""
    around = [(stop - first, name, first) for first, stop, name in functions if first <= line <= stop]
    return f"{min(around)[1]}:{line - min(around)[2]}" if around else ""
