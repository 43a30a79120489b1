"""What the guard's findings mean for a run: refused or warned of, by the size of a step and --exact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.errors import RequestError
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.guard.findings import Finding, Refusal, decide
from multigpu_cli.run.guard.first_batch import check_user_code
from tests.run.guard import planted_models as planted
from tests.run.test_profile_micro_batch import components

ALWAYS, SEVERAL, EXACT, NEVER = (Finding(each.name, "b", "c", each) for each in Refusal)
QUIET = Finding("projection", "b", "c", Refusal.NEVER, only_several=True)


@pytest.mark.parametrize(
    ("several", "exact", "refused"),
    [
        (False, False, [ALWAYS]),
        (True, False, [ALWAYS, SEVERAL]),
        (False, True, [ALWAYS, SEVERAL, EXACT]),
        (True, True, [ALWAYS, SEVERAL, EXACT]),
    ],
)
def test_decide_refuses_by_size_of_step_and_exactness(several: bool, exact: bool, refused: list[Finding]) -> None:
    findings = [ALWAYS, SEVERAL, EXACT, NEVER, QUIET]
    warned = [each for each in findings if each not in refused and (several or each is not QUIET)]
    assert decide(findings, several=several, exact=exact) == (refused, warned)
