import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.monitor.meters import Quantiles, StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_quantiles_are_within_half_a_per_cent_of_the_nearest_rank(values: list[float], share: float) -> None:
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert quantiles.quantile(share) == pytest.approx(exact, rel=0.0051)


def test_quantiles_take_bounded_memory() -> None:
    quantiles, draws = Quantiles(), random.Random(0)
    for _ in range(20_000):
        quantiles.add(10 ** draws.uniform(-6, 4))
    assert quantiles.count == 20_000
    assert len(quantiles._buckets) < 2400


def test_no_steps_have_no_quantiles() -> None:
    assert math.isnan(Quantiles().quantile(0.5))


def test_step_times_and_rates_of_run_and_window() -> None:
    clock = Clock()
    meters = StepTimer(clock=clock)
    for seconds in (0.1, 0.1, 0.1, 0.5):
        clock.pass_by(seconds)
        meters.step(64)
    first = meters.read()
    assert first["samples_per_second"] == pytest.approx(4 * 64 / 0.8)
    assert first["step_ms"] == pytest.approx(200)
    clock.pass_by(0.1)
    meters.step(32)
    assert meters.read()["samples_per_second"] == pytest.approx(320)
    assert (meters.steps, meters.samples) == (5, 288)
    assert meters.seconds == pytest.approx(0.9)
    assert meters.samples_per_second == pytest.approx(288 / 0.9)
    assert meters.step_ms()["p50"] == pytest.approx(100, rel=0.006)
    assert meters.step_ms()["p95"] == pytest.approx(500, rel=0.006)


def test_training_begins_once() -> None:
    clock, cpu = Clock(), Clock()
    meters = StepTimer(clock=clock, cpu=cpu)
    with meters.pause():
        clock.pass_by(1)
    for _ in range(2):  # the second time a step is done: what passes then is part of the next
        clock.pass_by(1000)
        cpu.pass_by(100)
        meters.start()
        clock.pass_by(0.1)
        meters.step(10)
    assert meters.seconds == pytest.approx(1000.2)
    assert meters.cpu_seconds() == pytest.approx(100)
    assert meters.step_ms()["p50"] == pytest.approx(100, rel=0.006)


def test_pauses_are_no_training_time() -> None:
    clock = Clock()
    meters = StepTimer(clock=clock)
    clock.pass_by(0.1)
    with meters.pause():
        clock.pass_by(1000)
    clock.pass_by(0.1)
    meters.step(10)
    assert meters.seconds == pytest.approx(0.2)
    assert meters.step_ms()["p50"] == pytest.approx(200, rel=0.006)


def test_cpu_time_of_the_window_leaves_pauses_out() -> None:
    clock, cpu = Clock(), Clock()
    meters = StepTimer(clock=clock, cpu=cpu)
    for passing in (0.5, 0.25):
        cpu.pass_by(passing)
        with meters.pause():
            cpu.pass_by(1000)
        assert meters.cpu_seconds() == pytest.approx(passing)
        meters.read()


def test_a_read_within_a_step_cuts_no_time_off_it() -> None:
    clock = Clock()
    meters = StepTimer(clock=clock)
    clock.pass_by(0.3)
    meters.read()
    clock.pass_by(0.1)
    meters.step(1)
    assert meters.step_ms()["p50"] == pytest.approx(400, rel=0.006)


def test_waits_for_data_count_as_training_too() -> None:
    clock = Clock()
    meters = StepTimer(clock=clock)
    for _ in range(2):
        with meters.data_wait:
            clock.pass_by(0.25)
    clock.pass_by(0.5)
    meters.step(8)
    assert meters.data_wait.read() == pytest.approx((0.5, 2))
    assert meters.data_wait.read() == (0, 0)
    assert meters.seconds == pytest.approx(1)


def test_where_the_device_runs_ahead_steps_count_with_the_mean_of_their_window() -> None:
    clock = Clock()
    meters = StepTimer(device_runs_ahead=True, clock=clock)
    for _ in range(9):
        clock.pass_by(0.001)  # only queued
        meters.step(16)
    clock.pass_by(0.891)  # the host waits for the device
    meters.read()
    assert meters.step_ms()["p50"] == pytest.approx(100, rel=0.006)


def test_an_empty_window_has_no_rate() -> None:
    assert StepTimer(clock=Clock()).read() == {"samples_per_second": 0.0, "step_ms": 0.0}
