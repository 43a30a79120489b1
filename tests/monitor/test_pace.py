from typing import Any

import pytest

from multigpu_cli.monitor.history import History
from multigpu_cli.monitor.pace import divide_step, forecast_checkpoint, forecast_step
from tests.commands.runs import PLAN, event, lines


def test_a_forecast_has_the_pace_of_the_newest_lines_and_their_scatter() -> None:
    even = History().follow([event(0, "start", plan=PLAN), *lines(1, 20, 0)])
    assert forecast_step(even, 40, now=20.0) == pytest.approx((20, 20, 20))
    assert forecast_step(even, 40, now=25.0) == pytest.approx((15, 15, 15))
    times = [0, 1, 4, 5, 8, 9, 12, 13, 16]  # one and three seconds in turn
    uneven = History().follow(
        [event(0, "start"), *(event(at, "train", step=step + 1) for step, at in enumerate(times))]
    )
    found = forecast_step(uneven, 9 + 16, now=16.0)
    assert found
    assert found.seconds == pytest.approx(32)
    assert found.high - 32 == pytest.approx(32 - found.low)
    assert found.high - 32 == pytest.approx((1.645 + 1.524 / 7) * (8 / 7 * (16 + 16**2 / 8)) ** 0.5)
    assert forecast_step(History().follow([event(0, "start", plan=PLAN)]), 40, now=1.0) is None


@pytest.mark.parametrize(("every", "step", "seconds"), [(None, 24, 3), ("50", 40, 19), ("10", 30, 9), ("2m", None, 99)])
def test_the_next_checkpoint(every: str | None, step: int | None, seconds: float) -> None:
    """At the end of an epoch, at a step, of which the last is one, or by the clock."""
    history = History().follow([event(0, "start", plan=PLAN), *lines(1, 21, 0), event(-69, "checkpoint", step=12)])
    found, due = forecast_checkpoint(history, every, now=21.0)
    assert due
    assert found == step
    assert due.seconds == pytest.approx(seconds)


def test_the_time_of_a_step_by_rank() -> None:
    """Rank 2 is slow, so the others wait for it; what all of them wait is communication."""
    measured: dict[str, Any] = {
        "step_ms": 100.0,
        "own_ms": [60.0, 50.0, 90.0],
        "comm_share": 0.1,
        "data_wait_share": 0.3,
    }
    found = divide_step(History().follow([event(0, "start"), *lines(1, 1, 0, **measured)]))
    assert found
    assert found.parts == [pytest.approx(each) for each in ((30, 30, 10, 30), (30, 20, 10, 40), (30, 60, 10, 0))]
    assert all(sum(each) == pytest.approx(100) for each in found.parts)
    assert found.says == (
        "rank 2 is the slowest: 90.0 ms of its own work a step, the median is 60.0 ms; waits for data 30% of the time"
    )
    many = measured | {"own_ms": {"min": 50.0, "mean": 60.0, "max": 90.0, "worst_rank": 77}}
    found = divide_step(History().follow([event(0, "start"), *lines(1, 1, 0, **many)]))
    assert found
    assert (found.ranks[2], found.says[:7]) == ("greatest", "rank 77")
    alone = divide_step(History().follow([event(0, "start"), *lines(1, 1, 0)]))
    assert alone
    assert (alone.says, alone.measured) == ("", False)
    assert sum(alone.parts[0]) == pytest.approx(30)
    assert divide_step(History().follow([event(0, "start")])) is None


@pytest.mark.parametrize(
    ("device", "location", "advice"),
    [
        ("cpu", "in host memory", ": try a larger --batch-size"),
        ("cpu", "fetched by 2 processes", ": try more --num-workers, or a TensorDataset"),
        ("NVIDIA H200", "in host memory", ": try --data-on-device on"),
        ("NVIDIA H200", "in GPU memory", ""),
    ],
)
def test_advice_on_data_has_an_effect(device: str, location: str, advice: str) -> None:
    begin = event(0, "start", plan=PLAN | {"device": device}, data=location)
    shares = divide_step(History().follow([begin, *lines(1, 1, 0, step_ms=10.0, data_wait_share=0.8)]))
    assert shares
    assert shares.says == f"waits for data 80% of the time{advice}"
