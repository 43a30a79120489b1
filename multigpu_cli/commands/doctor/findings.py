"""What the doctor finds: a verdict, the evidence, and what to do about it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from multigpu_cli.errors import pluralize

Verdict = Literal["ok", "warn", "fail", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        evidence: what was seen or measured.
        fix: a command, or what else mends it; empty where nothing has to be.
        numbers: the measured figures, for machines.
    """

    name: str
    verdict: Verdict
    evidence: str
    fix: str = ""
    numbers: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """A line each, its fix below it, and the count of what is wrong."""
    wide = max(len(finding.name) for finding in findings)
    shown = []
    for finding in findings:
        mark = {"not checked": "-"}.get(finding.verdict, finding.verdict)
        evidence = f"not checked: {finding.evidence}" if finding.verdict == "not checked" else finding.evidence
        first, *more = evidence.splitlines()
        shown.append(f"{mark:<4}  {finding.name:<{wide}}  {first}")
        shown += [f"{'':<{wide + 8}}{line}" for line in more]
        if finding.fix:
            shown.append(f"{'':<{wide + 8}}fix: {finding.fix}")
    counts = {kind: sum(finding.verdict == kind for finding in findings) for kind in ("ok", "warn", "fail")}
    rest = sum(finding.verdict == "not checked" for finding in findings)
    wrong = f"{pluralize(counts['warn'], 'warning')}, {pluralize(counts['fail'], 'failure')}"
    return [*shown, f"{counts['ok']} ok, {wrong}, {rest} not checked"]
