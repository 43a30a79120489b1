"""What the guard finds in user code, and whether a run is refused for it."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Refusal(Enum):
    """When a finding refuses the run; otherwise it is a warning.

    A step of one micro-batch on one worker is plain PyTorch, so most faults matter only beyond that, or with --exact.
    """

    ALWAYS = "always"
    SEVERAL = "a step has several micro-batches or workers, or with --exact"
    EXACT = "with --exact"
    NEVER = "never"


class Finding(NamedTuple):
    """One fault of user code: what and where it is, why it matters, and how to mend it."""

    problem: str
    reason: str
    remedy: str
    refusal: Refusal
    only_several: bool = False  # without effect, and so not mentioned, if a step is one micro-batch on one worker

    def __str__(self) -> str:
        return f"{self.problem}: {self.reason}; try: {self.remedy}"


class Verdict(NamedTuple):
    """The findings that refuse a run, and those that warn."""

    refused: list[Finding]
    warned: list[Finding]


def decide(findings: Sequence[Finding], *, several: bool, exact: bool) -> Verdict:
    """Divide the findings for a run whose steps have `several` micro-batches or workers."""
    holds = {
        Refusal.ALWAYS: True,
        Refusal.SEVERAL: several or exact,
        Refusal.EXACT: exact,
        Refusal.NEVER: False,
    }
    verdict = Verdict([], [])
    for finding in findings:
        if several or not finding.only_several:
            (verdict.refused if holds[finding.refusal] else verdict.warned).append(finding)
    return verdict


def list_names(names: Sequence[str], most: int = 3) -> str:
    """'a, b, c and 5 more'."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
