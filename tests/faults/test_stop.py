import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from multigpu_cli.distributed.world import World, all_reduce_max
from multigpu_cli.faults import stop
from multigpu_cli.faults.stop import StopConsensus, StopRequest
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_noted_and_nothing_else_happens(number: signal.Signals) -> None:
    with StopRequest() as request:
        before = request.signal
        os.kill(os.getpid(), number)
        assert (before, request.signal) == (None, number.name)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal == number.name, "the first one counts"


def test_the_handlers_before_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_second_ctrl_c_stops_at_once_but_an_echo_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches a worker from the terminal and, a moment later, from its agent."""
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal == "SIGINT"
        monkeypatch.setattr(stop, "_ECHO", 0.0)
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_in_another_thread_there_is_nothing_to_handle() -> None:
    found: list[Any] = []

    def work() -> None:
        with StopRequest() as request:
            found.append(request.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]


def test_alone_every_step_is_a_meeting() -> None:
    agreement = StopConsensus(ALONE)
    assert agreement.vote(1, (True, False)) == [True, False]
    assert agreement.vote(2, (False, True)) == [False, True]


def meetings(
    seconds_per_step: float, steps: range, wish: Callable[[World, int], bool] = lambda world, step: False
) -> Callable[[World], list[Any]]:
    """What a rank hears in each step of a run of such a pace; the clock is made up."""

    def work(world: World) -> list[Any]:
        clock = [100.0]
        time.monotonic = lambda: clock[0]  # a forked process of its own
        heard = []
        met: list[int] = []

        def counted(world: World, values: list[float]) -> list[float]:
            met.append(current[0])
            return all_reduce_max(world, values)

        patch.object(stop, "all_reduce_max", counted).start()
        current = [0]
        agreement = StopConsensus(world)
        for step in steps:
            clock[0] += seconds_per_step * (1 + world.rank)  # the ranks do not quite agree on the time
            current[0] = step
            heard.append((step, agreement.vote(step, (wish(world, step), False))))
        return [heard, met]

    return work


def test_all_ranks_hear_of_a_wish_at_the_same_step() -> None:
    answers = run_on_each_rank(3, meetings(0.02, range(1, 200), lambda world, step: world.rank == 1 and step >= 60))
    first = [next(step for step, granted in heard if granted[0]) for heard, _ in answers]
    assert len(set(first)) == 1
    assert 60 <= first[0] <= 90, "about half a second later at most"
    assert all(not granted[1] for heard, _ in answers for _, granted in heard)


def test_ranks_meet_about_every_half_second_not_at_each_step() -> None:
    answers = run_on_each_rank(2, meetings(0.01, range(1, 1001)))  # the slower rank: 0.02 s a step
    assert answers[0][1] == answers[1][1], "at the same steps, or one would wait alone"
    assert 30 <= len(answers[0][1]) <= 60


def test_slow_steps_meet_each_time() -> None:
    assert run_on_each_rank(2, meetings(2.0, range(1, 6)))[0][1] == [1, 2, 3, 4, 5]


def test_a_run_that_goes_on_at_a_high_step_does_not_take_its_pace_for_fast() -> None:
    """Step 5001 after half a second is no pace of 0.1 ms a step."""
    met = run_on_each_rank(2, meetings(0.25, range(5001, 5021)))[0][1]
    assert len(met) >= 8
