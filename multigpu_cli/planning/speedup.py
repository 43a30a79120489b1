"""Forecasts the speed-up by more workers from the times of one worker and a model of the link.

The reduction: DDP's buckets become ready one after the other during the last backward pass and are reduced in that
order, so only what is left when backward ends delays the step (Li et al., "PyTorch Distributed", VLDB 2020). A ring
all-reduce of S bytes among n takes 2 (n-1) latencies and 2 (n-1)/n · S bytes through each connection (Patarasuk and
Yuan 2009). Across machines: reduce-scatter within each, all-reduce of the parts between them, all-gather within.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf, isfinite

from multigpu_cli.planning.batch import BatchPlan

_FIRST_BUCKET, _BUCKET = 1, 25  # MiB, DDP's own sizes


@dataclass(frozen=True)
class Link:
    """A connection between workers.

    Attributes:
        latency: seconds of one hop.
        bandwidth: bytes a second that a worker sends while it receives as many.
        rests_on: where the two figures come from.
        overlaps: it carries bytes while the workers compute. Not between processes that fill a CPU: the cores do both.
    """

    name: str
    latency: float
    bandwidth: float
    rests_on: str
    overlaps: bool = True

    @classmethod
    def from_measurements(
        cls, how: str, workers: int, points: Sequence[tuple[float, float]], *, overlaps: bool
    ) -> "Link":
        """The wire between so many workers on which messages took so many (bytes, seconds)."""
        latency, bandwidth = fit_ring_model(points, workers)
        said = f"measured here: {how}, {workers} workers, {1e6 * latency:.0f} µs"
        said += f", {bandwidth / 1e9:.3g} GB/s" if isfinite(bandwidth) else ""
        return cls("measured", latency, bandwidth, said, overlaps)

    def all_reduce(self, size: float, workers: int) -> float:
        """Seconds for a tensor of so many bytes."""
        if workers == 1:
            return 0.0
        return 2 * (workers - 1) * self.latency + 2 * (workers - 1) / workers * size / self.bandwidth


ASSUMED = {
    wire.name: wire
    for wire in (
        Link("pcie4", 10e-6, 20e9, "PCIe 4.0 ×16: 32 GB/s a direction, 20 of which arrive; 10 µs a hop"),
        Link("nvlink4", 5e-6, 350e9, "NVLink 4 with a switch: 450 GB/s a direction, 350 of which arrive; 5 µs a hop"),
        Link("ethernet-25", 50e-6, 2.8e9, "25 Gbit/s: 3.1 GB/s, 2.8 of which arrive; 50 µs a hop (TCP)"),
        Link("ethernet-100", 30e-6, 11e9, "100 Gbit/s: 12.5 GB/s, 11 of which arrive; 30 µs a hop"),
        Link("infiniband-400", 5e-6, 45e9, "400 Gbit/s: 50 GB/s, 45 of which arrive; 5 µs a hop"),
    )
}
BETWEEN_MACHINES = {"ethernet-25", "ethernet-100", "infiniband-400"}


@dataclass(frozen=True)
class Interconnect:
    """The wire within a machine, and the one between machines.

    Attributes:
        per_machine: workers on one.
    """

    inside: Link
    between: Link | None = None
    per_machine: int = 8

    def all_reduce(self, size: float, workers: int) -> float:
        """Seconds for a tensor of so many bytes, hierarchically where there are several machines."""
        if self.between is None or workers <= self.per_machine:
            return self.inside.all_reduce(size, workers)
        here, machines = self.per_machine, -(-workers // self.per_machine)
        return self.inside.all_reduce(size, here) + self.between.all_reduce(size / here, machines)


@dataclass(frozen=True)
class StepTimes:
    """The times of one worker alone, in seconds.

    Attributes:
        data: fetching a micro-batch.
        forward, backward: of a micro-batch.
        commit: clipping and the optimizer, once a step.
        messages: bytes of each that is reduced as backward goes on.
        after: bytes that are reduced when it has ended.
        reduction: seconds of both, where as many workers were seen to take their steps together.
    """

    data: float
    forward: float
    backward: float
    commit: float
    messages: tuple[float, ...]
    after: float = 0.0
    reduction: float | None = None


def buckets(size: float, cap: int | None = None) -> tuple[float, ...]:
    """How DDP cuts a gradient of so many bytes: into buckets of `cap` MiB, or its own after a small first one."""
    first, full = (2.0**20 * mib for mib in ((cap, cap) if cap else (_FIRST_BUCKET, _BUCKET)))
    if size <= first:
        return (float(size),)
    count, left = divmod(size - first, full)
    return (first, *[full] * int(count), *([left] if left else []))


def exposed_seconds(work: StepTimes, network: Interconnect, workers: int) -> float:
    """Seconds of the reduction that backward does not hide."""
    if workers == 1:
        return 0.0
    after = network.all_reduce(work.after, workers) if work.after else 0.0
    if not network.inside.overlaps:
        modelled = sum(network.all_reduce(size, workers) for size in work.messages) + after
        return modelled if work.reduction is None else work.reduction
    done, reduced = 0.0, 0.0
    for size in work.messages:
        done += size
        ready = work.backward * done / sum(work.messages)  # as if gradients came evenly
        reduced = max(reduced, ready) + network.all_reduce(size, workers)
    return max(0.0, reduced - work.backward) + after


def step_seconds(work: StepTimes, network: Interconnect, workers: int, accumulation: int) -> float:
    """One optimizer step of so many micro-batches on each worker."""
    passes = accumulation * (work.data + work.forward + work.backward)
    return passes + exposed_seconds(work, network, workers) + work.commit


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """A forecast for some number of workers.

    Attributes:
        step: seconds of an optimizer step. waiting: the part of it that is exposed communication.
        speedup: samples per second, over one worker's. efficiency: speedup / workers.
        steps: optimizer steps of the run; of more samples each where the global batch grows.
        seconds: of the run. cost: of the run, where a price is known.
    """

    workers: int
    global_batch: int
    step: float
    waiting: float
    samples_per_second: float
    speedup: float
    efficiency: float
    steps: int
    seconds: float
    cost: float | None


def forecast(
    counts: Sequence[int],
    works: Sequence[StepTimes],
    network: Interconnect,
    *,
    micro_batch: int,
    global_batch: int | None,
    samples: int,
    epochs: float,
    accumulation: int = 1,
    drop_last: bool = False,
    noise_scale: float | None = None,
    price: float | None = None,
) -> list[ForecastRow]:
    """A row for each number of workers.

    With a noise scale 𝓑, a run at global batch B takes (1 + 𝓑/B) / (1 + 𝓑/B₁) times the steps that it takes at B₁
    (McCandlish et al. 2018, eq. 2.11, at equal final loss), and so more samples: the row says how long the same result
    takes, not the same samples.

    Args:
        works: the times of one worker, for each number; on a CPU the workers share its cores.
        global_batch: kept for any number of workers, or None: it grows with them.
        samples, epochs: the length of the run on one worker; a step takes at most all of the samples.
        accumulation: micro-batches of a step on each worker, where the global batch grows with them.
        price: of one worker's hour.
    """
    rows: list[ForecastRow] = []
    least = global_batch or micro_batch * accumulation
    base = BatchPlan(samples=samples, micro_batch=micro_batch, global_batch=least, workers=1, drop_last=drop_last)
    for workers, work in zip(counts, works, strict=True):
        plan = replace(base, global_batch=global_batch or least * workers, workers=workers)
        batch = plan.global_batch
        step = step_seconds(work, network, workers, ceil(plan.num_micro_batches(0) / workers))
        steps = float(ceil(round(epochs * plan.steps_per_epoch, 6)))
        if noise_scale is not None:
            smaller, larger = (1 + noise_scale / each.global_batch for each in (plan, base))
            steps = epochs * base.steps_per_epoch * smaller / larger
        rate = plan.num_samples(0) / step
        first = rows[0].samples_per_second if rows else rate / workers
        seconds = steps * step
        rows.append(
            ForecastRow(
                workers=workers,
                global_batch=batch,
                step=step,
                waiting=exposed_seconds(work, network, workers),
                samples_per_second=rate,
                speedup=rate / first,
                efficiency=rate / first / workers,
                steps=round(steps),
                seconds=seconds,
                cost=None if price is None else price * workers * seconds / 3600,
            )
        )
    return rows


def find_scaling_limit(rows: Sequence[ForecastRow]) -> int:
    """The number of workers beyond which the next row saves less than a tenth of the time."""
    for row, following in pairwise(rows):
        if following.seconds > 0.9 * row.seconds:
            return row.workers
    return rows[-1].workers


def fit_ring_model(points: Sequence[tuple[float, float]], workers: int) -> tuple[float, float]:
    """Latency and bandwidth of the ring model from measured (bytes, seconds): least squares of relative errors.

    Neither is below zero: where messages of other sizes took no longer, latency alone explains them, and the reverse.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    a, b = 2.0 * (workers - 1), 2 * (workers - 1) / workers
    s00 = sum(w * a * a for w in weights)
    s01 = sum(w * a * b * size for w, (size, _) in zip(weights, points, strict=True))
    s11 = sum(w * (b * size) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    t0 = sum(w * a * seconds for w, (_, seconds) in zip(weights, points, strict=True))
    t1 = sum(w * b * size * seconds for w, (size, seconds) in zip(weights, points, strict=True))
    determinant = s00 * s11 - s01 * s01
    latency, inverse = t0 * s11 - t1 * s01, s00 * t1 - s01 * t0
    if inverse <= 0 or determinant <= 1e-12 * s00 * s11:
        return t0 / s00, inf
    return (latency / determinant, determinant / inverse) if latency > 0 else (0.0, s11 / t1)
