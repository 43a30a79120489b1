"""Parts take part at the moments whose methods they have; one that is asked for joins those that are there."""

from typing import Any
from unittest.mock import Mock

import pytest

from multigpu_cli.run import part
from multigpu_cli.run.part import Part, add_requested_part, bind_moments
from multigpu_cli.run.run import Moments, Run
from tests.support.world import ALONE


class Follows(Part):
    """Has two of the moments."""

    def epoch_end(self, run: Run) -> None:
        """One."""

    def step_end(self, *_: Any) -> None:
        """Another."""


class Asked(Part):
    def __init__(self, *given: Any) -> None:
        self.given = given

    def step_end(self, *_: Any) -> None:
        """The one that it needs."""


def test_a_part_without_methods_does_nothing() -> None:
    idle = Part(Mock(), ALONE)
    assert (idle.plan_notes(), idle.state_dict(Mock())) == ({}, {})
    assert bind_moments([idle]) == Moments()


def test_a_part_that_is_asked_for_joins_the_others_at_its_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "REQUESTS", {"look": f"{__name__}:Asked"})
    first, run = Follows(Mock(), ALONE), Mock(world=ALONE)
    run.moments = before = bind_moments([first])
    assert before == Moments(epoch_end=(first.epoch_end,), step_end=(first.step_end,))
    run.log.state.take_request.return_value = []
    add_requested_part(run)
    assert run.moments is before
    run.log.state.take_request.return_value = ["look", "30", "an id"]
    add_requested_part(run)
    joined: Any = run.moments.step_end[1]
    assert joined.__self__.given == (run, 30, "an id")
    assert run.moments == Moments(epoch_end=(first.epoch_end,), step_end=(first.step_end, joined))
