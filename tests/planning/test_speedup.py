from dataclasses import replace
from math import inf

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.planning.speedup import (
    ASSUMED,
    ForecastRow,
    Interconnect,
    Link,
    StepTimes,
    buckets,
    exposed_seconds,
    find_disturbance,
    find_scaling_limit,
    fit_ring_model,
    forecast,
    step_seconds,
)

MIB = 2**20
WIRE = Link("test", 0.0, 1e9, "")
WORK = StepTimes(data=0.01, forward=0.1, backward=0.2, commit=0.02, messages=buckets(51 * MIB))


def test_a_ring() -> None:
    wire = Link("test", 1e-3, 1e9, "")
    assert wire.all_reduce(4e9, 1) == 0
    assert wire.all_reduce(4e9, 4) == pytest.approx(6e-3 + 1.5 * 4)


def test_across_machines_each_worker_carries_its_part() -> None:
    inside, between = Link("in", 0.0, 8e9, ""), Link("out", 0.0, 1e9, "")
    network = Interconnect(inside, between, per_machine=4)
    assert network.all_reduce(4e9, 4) == inside.all_reduce(4e9, 4)
    assert network.all_reduce(4e9, 8) == pytest.approx(1.5 * 0.5 + 2 * 0.5 * 1)
    usual = Interconnect(inside, between)
    assert usual.all_reduce(4e9, 8) == inside.all_reduce(4e9, 8), "a machine has eight, if not said"
    assert usual.all_reduce(4e9, 9) == pytest.approx(1.75 * 0.5 + 1 * 0.5)


def test_buckets_are_those_of_ddp() -> None:
    assert buckets(1000) == (1000,)
    assert buckets(51 * MIB) == (MIB, 25 * MIB, 25 * MIB)
    assert buckets(30 * MIB) == (MIB, 25 * MIB, 4 * MIB)
    assert buckets(9 * MIB, 4) == (4 * MIB, 4 * MIB, MIB), "a size that was asked for is that of the first one, too"
    assert buckets(3 * MIB, 4) == (3 * MIB,)


def test_what_backward_hides_costs_nothing() -> None:
    """Two workers: each bucket takes as long as its bytes. The last one starts when backward ends."""
    assert WORK.own_seconds == pytest.approx(0.01 + 0.1 + 0.2 + 0.02)
    assert exposed_seconds(WORK, Interconnect(WIRE), 1) == 0
    assert exposed_seconds(WORK, Interconnect(WIRE), 2) == pytest.approx(25 * MIB / 1e9)
    slow = Interconnect(replace(WIRE, bandwidth=1e7))
    assert exposed_seconds(WORK, slow, 2) == pytest.approx(0.2 * 1 / 51 + 51 * MIB / 1e7 - 0.2), (
        "the wire is never idle"
    )
    assert exposed_seconds(WORK, Interconnect(replace(WIRE, overlaps=False)), 2) == pytest.approx(51 * MIB / 1e9), (
        "nothing is hidden"
    )
    assert exposed_seconds(replace(WORK, after=10_000_000), Interconnect(WIRE), 2) == pytest.approx(
        25 * MIB / 1e9 + 0.01
    ), "there is nothing to hide them behind"
    nothing_hidden = exposed_seconds(replace(WORK, after=10_000_000), Interconnect(replace(WIRE, overlaps=False)), 2)
    assert nothing_hidden == pytest.approx(51 * MIB / 1e9 + 0.01)
    last = replace(WORK, messages=(), after=51 * MIB)
    assert exposed_seconds(last, Interconnect(WIRE), 2) == pytest.approx(51 * MIB / 1e9), (
        "--exact sends when backward has ended"
    )
    assert step_seconds(WORK, Interconnect(WIRE), 2, 3) == pytest.approx(3 * 0.31 + 25 * MIB / 1e9 + 0.02)


@given(st.integers(1, 2**31), st.integers(2, 64), st.floats(1e7, 1e12), st.floats(0, 1e-3))
def test_no_wire_is_better_than_none(gradient: int, workers: int, bandwidth: float, latency: float) -> None:
    work, network = replace(WORK, messages=buckets(gradient)), Interconnect(Link("any", latency, bandwidth, ""))
    hidden = exposed_seconds(work, network, workers)
    assert 0 <= hidden <= sum(network.all_reduce(size, workers) for size in buckets(gradient)) + 1e-9
    assert sum(buckets(gradient)) == gradient


def batches(micro_batch: int, samples: int, global_batch: int = 0, *, drop_last: bool = False) -> BatchPlan:
    size = global_batch or micro_batch
    return BatchPlan(samples=samples, micro_batch=micro_batch, global_batch=size, workers=1, drop_last=drop_last)


def test_a_growing_batch_takes_fewer_steps() -> None:
    rows = forecast([1, 2, 4], [WORK] * 3, Interconnect(WIRE), batches(32, 1280), 2, grows=True, price=3.6)
    assert [(row.workers, row.global_batch, row.steps) for row in rows] == [(1, 32, 80), (2, 64, 40), (4, 128, 20)]
    assert rows[0].step == pytest.approx(0.33)
    assert rows[0].seconds == pytest.approx(80 * 0.33)
    assert [row.cost for row in rows] == pytest.approx([row.workers * row.seconds * 0.001 for row in rows])
    assert rows[1].speedup == pytest.approx(2 * 0.33 / (0.33 + 25 * MIB / 1e9))
    assert rows[1].efficiency == pytest.approx(0.33 / (0.33 + 25 * MIB / 1e9))


def test_a_measurement_that_other_work_disturbed_is_found() -> None:
    free = Interconnect(Link("free", 0.0, 1e30, ""))

    def rows(slowed: float) -> list[ForecastRow]:
        alone = replace(WORK, forward=slowed * WORK.forward, backward=slowed * WORK.backward)
        return forecast([1, 2], [alone, WORK], free, batches(8, 80), 1, grows=True)

    assert find_disturbance(rows(1.0), (0.3, 0.39)) == find_disturbance(rows(1.0), (3.0, 4.0)) == ""
    assert find_disturbance(rows(1.0), (0.3, 0.41)) == "a step of one worker took 300.00 ms, then 410.00 ms"
    assert find_disturbance(rows(2.0), (0.3, 0.3)).startswith("2 workers would have an efficiency of 19")
    assert find_disturbance(rows(1.0), ()) == ""
    assert find_disturbance([replace(row, efficiency=1.1) for row in rows(1.0)], ()) == ""


def test_a_fixed_batch_is_shared_out() -> None:
    """100 samples as four micro-batches: three workers are no quicker than two, one of them has two of the four."""
    free = Interconnect(Link("free", 0.0, 1e30, ""))
    rows = forecast([1, 2, 3, 4], [WORK] * 4, free, batches(32, 1000, global_batch=100), 1, grows=False)
    assert [row.steps for row in rows] == [10] * 4
    assert [row.step for row in rows] == [pytest.approx(n * 0.31 + 0.02) for n in (4, 2, 2, 1)]
    assert find_scaling_limit(rows) == find_scaling_limit(rows[:2]) == 2
    saving = [replace(row, seconds=seconds) for row, seconds in zip(rows, (10.0, 9.0, 8.0), strict=False)]
    assert find_scaling_limit(saving) == 3, "a tenth is enough"


def test_accumulation_makes_steps_larger_and_fewer() -> None:
    free = Interconnect(Link("free", 0.0, 1e30, ""))
    rows = forecast([1, 2], [WORK] * 2, free, batches(8, 100, global_batch=32), 2.0, grows=True)
    assert [(row.global_batch, row.steps) for row in rows] == [(32, 8), (64, 4)], "each epoch ends with a short step"
    assert [row.step for row in rows] == [pytest.approx(4 * 0.31 + 0.02)] * 2
    assert rows[0].samples_per_second == pytest.approx(32 / rows[0].step)
    (whole,) = forecast([1], [WORK], free, batches(32, 100, drop_last=True), 2.0, grows=True)
    assert whole.steps == 6


def test_a_step_takes_no_more_samples_than_there_are() -> None:
    """Two micro-batches are all there is: eight workers are no quicker than two, and six of them idle."""
    free = Interconnect(Link("free", 0.0, 1e30, ""))
    rows = forecast([1, 2, 8], [WORK] * 3, free, batches(4, 8), 5.0, grows=True)
    assert [row.steps for row in rows] == [10, 5, 5]
    assert [row.samples_per_second * row.step for row in rows] == pytest.approx([4, 8, 8])


def test_the_noise_scale_says_where_larger_batches_stop_helping() -> None:
    """At B ≪ 𝓑 twice the batch halves the steps, at B ≫ 𝓑 it saves none."""
    free = Interconnect(Link("free", 0.0, 1e30, ""))

    def seconds(noise: float) -> list[float]:
        rows = forecast([1, 2], [WORK] * 2, free, batches(32, 3200), 2, grows=True, noise_scale=noise)
        return [row.seconds for row in rows]

    much, little = seconds(1e9), seconds(1e-3)
    assert much[0] == little[0] == pytest.approx(200 * 0.33)
    assert much[1] == pytest.approx(much[0] / 2, rel=1e-3)
    assert little[1] == pytest.approx(little[0], rel=1e-3)
    assert seconds(32.0)[1] == pytest.approx(seconds(32.0)[0] * 0.75), "(1 + 32/64) / (1 + 32/32)"


def test_a_wire_is_found_again_from_its_times() -> None:
    wire = Link("known", 2e-5, 3e9, "")
    points = [(float(size), wire.all_reduce(size, 4)) for size in (8, 2**18, 2**24)]
    assert fit_ring_model(points, 4) == pytest.approx((2e-5, 3e9))
    found = Link.from_measurements("gloo", 4, points, overlaps=False)
    assert (found.rests_on, found.overlaps) == ("measured here: gloo, 4 workers, 20 µs, 3 GB/s", False)


@pytest.mark.parametrize("sizes", [(8.0, 8.0), (716.0, 264.0), (8.0, 2.0**20, 2.0**24)])
def test_where_latency_or_bytes_explain_nothing_the_other_explains_all(sizes: tuple[float, ...]) -> None:
    """Times that do not grow with the size are latency; those that grow faster than it are bytes alone."""
    assert fit_ring_model([(size, 2e-3) for size in sizes], 2) == pytest.approx((1e-3, inf))
    falling = [(size, 1e-3 * (2 - size / 2**24)) for size in sizes]
    latency, bandwidth = fit_ring_model(falling, 2)
    assert (0.5e-3 <= latency <= 1e-3, bandwidth) == (True, inf)
    assert "GB/s" not in Link.from_measurements("gloo", 2, falling, overlaps=False).rests_on
    if len(set(sizes)) > 1:
        latency, bandwidth = fit_ring_model([(size, size**1.2) for size in sizes], 2)
        assert latency == 0
        assert 0 < bandwidth < inf


@pytest.mark.parametrize(("power", "columns"), [(0.9, [0, 1]), (1.2, [1])])
def test_the_relative_errors_are_the_least(power: float, columns: list[int]) -> None:
    """As numpy fits latency and bytes, or bytes alone where the latency would be negative."""
    points = [(size, size**power) for size in (2.0**10, 2.0**15, 2.0**20)]
    rows, found = numpy.array([(6 / seconds, 1.5 * size / seconds) for size, seconds in points]), numpy.zeros(2)
    found[columns] = numpy.linalg.lstsq(rows[:, columns], numpy.ones(3))[0]
    assert fit_ring_model(points, 4) == pytest.approx((found[0], 1 / found[1]))


def test_a_reduction_that_was_seen_is_not_modelled() -> None:
    """Between workers that share a CPU; a plan for another wire does not know it."""
    seen = replace(WORK, reduction=0.007)
    assert exposed_seconds(seen, Interconnect(replace(WIRE, overlaps=False)), 2) == 0.007
    assert exposed_seconds(seen, Interconnect(replace(WIRE, overlaps=False)), 1) == 0
    assert exposed_seconds(seen, Interconnect(WIRE), 2) == exposed_seconds(WORK, Interconnect(WIRE), 2)


def test_what_is_assumed_is_said() -> None:
    assert set(ASSUMED) == {"pcie4", "nvlink4", "ethernet-25", "ethernet-100", "infiniband-400"}
    for wire in ASSUMED.values():
        arrives, hop = f"{wire.bandwidth / 1e9:g} of which arrive", f"{1e6 * wire.latency:g} µs a hop"
        assert (arrives in wire.rests_on, hop in wire.rests_on, wire.overlaps) == (True, True, True)
