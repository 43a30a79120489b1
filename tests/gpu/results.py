"""What the checks found: one JSON object a line in a file, which says at the next call what is left to do."""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PASSED, FAILED, UNVERIFIED, SKIPPED = "passed", "failed", "unverified", "skipped"

Line = dict[str, Any]


class Results:
    """Lines of earlier calls and of this one; of each check the newest counts.

    Args:
        file: is appended to.
        machine: {"device", "torch", "code", …}. Lines of another machine, or of other code, do not count.
    """

    def __init__(self, file: Path, machine: Line) -> None:
        self._file, self._machine = file, machine
        self._newest = {line["check"]: line for line in _read_lines(file) if self._counts(line)}

    def _counts(self, line: Line) -> bool:
        return "check" in line and line.get("machine") == self._machine

    def add(self, check: str, verdict: str, said: str, seconds: float, facts: Line) -> Line:
        """Append one result, and return it."""
        line: Line = {"check": check, "verdict": verdict, "said": said, "seconds": round(seconds, 1), "facts": facts}
        line |= {"machine": self._machine, "time": time.time()}
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._newest[check] = line
        return line

    def left(self, checks: Iterable[str]) -> list[str]:
        """Those that have no result yet, in order."""
        return [check for check in checks if check not in self._newest]

    def end(self, checks: Sequence[str]) -> tuple[Line, int]:
        """The last line of a call, and its exit code: 0 green, 1 something failed, 75 the same command goes on."""
        by_verdict = {
            verdict: [name for name in checks if self._newest.get(name, {}).get("verdict") == verdict]
            for verdict in (PASSED, FAILED, UNVERIFIED, SKIPPED)
        }
        left = self.left(checks)
        word, code = ("unfinished", 75) if left else ("failed", 1) if by_verdict[FAILED] else ("green", 0)
        return {"end": word} | by_verdict | {PASSED: len(by_verdict[PASSED]), "left": left}, code


def _read_lines(file: Path) -> Iterable[Line]:
    """Every whole line; a call that was killed may have left half of one."""
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line
