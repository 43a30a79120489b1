"""make mutants: small faults drawn from the code by seed; the nearest tests must notice each of them.

python -m tests.mutants --count 300 --seed 17      # goes on where it was stopped
python -m tests.mutants --only 41                  # one of them again, with what pytest says
python -m tests.mutants --since v0.1.0             # only of lines that have changed since that commit
python -m tests.mutants --again                    # those that survived so far, once more

mutmut and cosmic-ray were tried. mutmut 3 puts a dispatcher in place of each function and leaves out decorated ones
(every context manager and property) and what stands outside of functions; it mutates strings. cosmic-ray changes the
working tree itself, has no deletion of statements, and starts an interpreter per mutant, which pays for torch's import
again. Neither draws by seed or chooses tests per line, also through ranks that are forked or launched.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from tests.mutants.copy import Copy
from tests.mutants.mutations import Mutation, changed_lines, draw_mutations, files, mutations_of
from tests.mutants.nearest import Nearest, own_tests
from tests.mutants.results import Result, Results, equivalents, key, summary

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.05
T = TypeVar("T")


def run_tests(copy: Copy, mutation: Mutation, nearest: Nearest) -> Result:
    """Run its tests until one fails; another file's test must do so twice: it may depend on time."""
    chosen, own = nearest.choose(mutation), own_tests(mutation.file)
    left, verdict, by, cpu = dict(chosen.limits), "survived", "", 0.0

    def run(limits: dict[str, float]) -> tuple[str, dict[str, Any]]:
        nonlocal cpu
        told = copy.run(limits, first=chosen.first, words=["-x", "--hypothesis-seed=0"])
        cpu += told["cpu"]
        return _verdict(told), told

    with copy.mutated(mutation):
        while left:
            verdict, told = run(left)
            by = next(iter(told["failed"]), "")
            if by not in left or by.startswith(own) or run({by: left[by]})[0] != "survived":
                break
            left = {test: limit for test, limit in left.items() if test not in told["done"]}
            verdict, by = "survived", ""
    return Result(mutation.name, verdict, by, len(chosen.limits), round(cpu, 1), mutation.diff())


def _verdict(told: dict[str, Any]) -> str:
    if told.get("signal") == signal.SIGALRM:
        return "timeout"
    if told["failed"] or told.get("signal"):
        return "killed"
    return "survived" if told.get("code") == 0 else "broken"


def spread(copies: list[Copy], tasks: Iterable[T], work: Callable[[Copy, T], None]) -> None:
    """Do the tasks in the copies, each in the next one that is free."""
    left = deque(tasks)

    def until_done(copy: Copy) -> None:
        while left:
            try:
                task = left.popleft()
            except IndexError:
                return
            work(copy, task)

    with ThreadPoolExecutor(len(copies)) as pool:
        try:
            for future in [pool.submit(until_done, copy) for copy in copies]:
                future.result()
        except BaseException:
            left.clear()
            for copy in copies:
                copy.close()
            raise


def play(asked: argparse.Namespace, mutations: list[Mutation], results: Results) -> None:
    nearest, lock = Nearest(ROOT, asked.folder / "nearest.jsonl", asked.budget), threading.Lock()
    number = {mutation: place for place, mutation in enumerate(mutations, 1)}
    known = equivalents()

    def gather(copy: Copy, name: str) -> None:
        failed = nearest.gather(copy, name)
        with lock:
            print(f"{name}: {f'left out, they fail unmutated: {failed}' if failed else 'gathered'}", flush=True)

    def due(mutation: Mutation) -> bool:
        result = results.of(mutation)
        if asked.only:
            return bool(number[mutation] == asked.only)
        within = mutation.file.startswith(f"multigpu_cli/{asked.room}")
        fresh = not result or result.verdict == "broken" or (asked.again and result.verdict == "survived")
        return within and fresh and key(mutation) not in known

    def judge(copy: Copy, mutation: Mutation) -> None:
        result = run_tests(copy, mutation, nearest)
        with lock:
            results.add(result)
            what = result.diff if result.verdict in {"survived", "broken"} else result.diff.partition("\n")[0]
            said = f" by {result.by}" if result.by else ""
            print(f"{number[mutation]}/{len(mutations)} {result.verdict}{said} in {result.seconds:.1f} s: {what}")
            if asked.only or result.verdict == "broken":
                print(copy.log())
            sys.stdout.flush()

    chosen = [mutation for mutation in mutations if due(mutation)]
    if chosen:
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mut-")))
            homes = [home / str(place) for place in range(min(asked.workers, len(chosen)))]
            copies = [stack.enter_context(Copy(ROOT, one)) for one in homes]
            spread(copies, nearest.unknown(chosen), gather)
            spread(copies, chosen, judge)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--folder", type=Path, default=ROOT / "mutants", help="results; remove it to begin anew")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--budget", type=float, default=60, metavar="SECONDS", help="of tests for a mutant")
    parser.add_argument("--room", default="", help="of those drawn only what is in this room (run, engine.py, …)")
    parser.add_argument("--since", metavar="COMMIT", help="draw from the lines that have changed since then")
    parser.add_argument("--only", type=int, metavar="N", help="the Nth alone, once more")
    parser.add_argument("--again", action="store_true", help="those that survived, once more")
    asked = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background, and so all that it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and what was started is ended
    asked.folder.mkdir(parents=True, exist_ok=True)
    everything = [one for file in files(ROOT) for one in mutations_of(file, (ROOT / file).read_text(encoding="utf-8"))]
    if asked.since:
        changed = changed_lines(ROOT, asked.since)
        everything = [one for one in everything if one.touches(changed.get(one.file, set()))]
    mutations, results = draw_mutations(everything, asked.seed, asked.count), Results(asked.folder / "results.jsonl")
    print(f"{len(mutations)} of {len(everything)} possible mutants, seed {asked.seed}, results in {asked.folder}")
    play(asked, mutations, results)
    told, share = summary(mutations, results, equivalents())
    print(told)
    return 1 if share >= LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
