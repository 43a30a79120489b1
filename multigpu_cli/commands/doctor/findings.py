"""What the doctor finds: a verdict, the evidence, and what to do about it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from multigpu_cli.errors import FAILED, pluralize

Verdict = Literal["ok", "warn", "fail", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        evidence: what was seen or measured.
        fix: a command, or what else mends it; empty where nothing is wrong.
        numbers: the measured figures, for machines.
    """

    name: str
    verdict: Verdict
    evidence: str
    fix: str = ""
    numbers: dict[str, Any] | None = None


def warn_if(bad: bool, name: str, evidence: str, fix: str, numbers: dict[str, Any] | None = None) -> Finding:
    """A warning with its fix where something is bad, else a finding that is ok."""
    return Finding(name, "warn" if bad else "ok", evidence, fix if bad else "", numbers)


def choose_exit_code(findings: Iterable[Finding]) -> int:
    """1 where a check has failed, else 0."""
    return FAILED if any(finding.verdict == "fail" for finding in findings) else 0


def format_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """A line each, its fix below it, and the count of each verdict."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        unchecked = finding.verdict == "not checked"
        mark = "-" if unchecked else finding.verdict
        evidence = f"not checked: {finding.evidence}" if unchecked else finding.evidence
        first, *more = evidence.splitlines()
        yield f"{mark:<4}  {finding.name:<{width}}  {first}"
        for line in [*more, *([f"fix: {finding.fix}"] if finding.fix else [])]:
            yield f"{'':<{width + 8}}{line}"
    counts = Counter(finding.verdict for finding in findings)
    wrong = f"{pluralize(counts['warn'], 'warning')}, {pluralize(counts['fail'], 'failure')}"
    yield f"{counts['ok']} ok, {wrong}, {counts['not checked']} not checked"
