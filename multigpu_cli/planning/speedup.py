"""Forecasts the speed-up by more workers from one worker's times and a model of the interconnect.

The reduction: DDP's buckets become ready one after the other during the last backward pass and are reduced in that
order, so only the part that remains after backward delays the step (Li et al., "PyTorch Distributed", VLDB 2020). A
ring all-reduce of S bytes among n workers takes 2 (n-1) latencies and sends 2 (n-1)/n · S bytes over each connection
(Patarasuk and Yuan 2009). Across machines: reduce-scatter within each, all-reduce of the parts between them, and
all-gather within.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf, isfinite

from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.planning.memory import Sharding

_FIRST_BUCKET, _BUCKET = 1, 25  # MiB, DDP's defaults


@dataclass(frozen=True)
class Link:
    """A connection between workers."""

    name: str
    latency: float  # seconds of one hop
    bandwidth: float  # bytes per second and direction, while the link sends and receives
    rests_on: str  # the source of the two values
    overlaps: bool = True  # communication runs while the workers compute. Not on a CPU, whose cores do both

    @classmethod
    def from_measurements(
        cls, how: str, workers: int, points: Sequence[tuple[float, float]], *, overlaps: bool
    ) -> "Link":
        """Fit a link between `workers` workers to measured (bytes, seconds) of all-reduces."""
        latency, bandwidth = fit_ring_model(points, workers)
        source = f"measured here: {how}, {workers} workers, {1e6 * latency:.0f} µs"
        source += f", {bandwidth / 1e9:.3g} GB/s" if isfinite(bandwidth) else ""
        return cls("measured", latency, bandwidth, source, overlaps)

    def all_reduce(self, size: float, workers: int) -> float:
        """Seconds for a tensor of `size` bytes."""
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
    """The link within a machine, and the one between machines."""

    inside: Link
    between: Link | None = None
    per_machine: int = 8  # workers per machine

    def all_reduce(self, size: float, workers: int) -> float:
        """Seconds for a tensor of `size` bytes; hierarchical for several machines."""
        if self.between is None or workers <= self.per_machine:
            return self.inside.all_reduce(size, workers)
        here, machines = self.per_machine, -(-workers // self.per_machine)
        return self.inside.all_reduce(size, here) + self.between.all_reduce(size / here, machines)

    def all_reduce_between(self, size: float, group: int, groups: int) -> float:
        """Seconds for tensors of `size` bytes, each of one worker of every group."""
        link = self.between if self.between is not None and group * groups > self.per_machine else self.inside
        return link.all_reduce(size, groups)


@dataclass(frozen=True)
class StepTimes:
    """The times of a single worker, in seconds.

    With divided weights the messages are the groups: each is gathered in passes, and its gradient scattered in the last
    one, or in each (see `Sharding.reductions`). If that was not measured, gathering and scattering take as long as one
    all-reduce.
    """

    data: float  # to fetch a micro-batch
    forward: float  # of a micro-batch
    backward: float  # of a micro-batch
    commit: float  # clipping and optimizer, once per step; of one worker's part, where `gather` was measured
    messages: tuple[float, ...]  # sizes in bytes of the buckets that are reduced during backward
    after: float = 0.0  # bytes that are reduced after backward
    reduction: float | None = None  # of both, measured in steps of as many workers; sharded ones: of all gradients once
    gather: float | None = None  # of all weights once, measured in sharded steps
    sharding: Sharding | None = None  # None: the weights are not divided

    @property
    def own_seconds(self) -> float:
        """A step of one micro-batch, without communication."""
        return self.data + self.forward + self.backward + self.commit


def buckets(size: float, cap: int | None = None) -> tuple[float, ...]:
    """DDP's buckets for gradients of `size` bytes: of `cap` MiB, or DDP's defaults with a smaller first one."""
    first, full = (2.0**20 * mib for mib in ((_FIRST_BUCKET, _BUCKET) if cap in (None, _BUCKET) else (cap, cap)))
    if size <= first:
        return (float(size),)
    count, left = divmod(size - first, full)
    return (first, *[full] * int(count), *([left] if left else []))


def exposed_seconds(work: StepTimes, network: Interconnect, workers: int, passes: int = 1) -> float:
    """Seconds of communication that do not overlap with each worker's passes of a step."""
    if workers == 1:
        return 0.0
    after = network.all_reduce(work.after, workers) if work.after else 0.0
    if work.sharding:
        return after + _exposed_in_groups(work, work.sharding, network, workers, passes)
    if not network.inside.overlaps:
        whole = sum(network.all_reduce(size, workers) for size in work.messages)
        return whole + after if work.reduction is None else work.reduction
    done, reduced = 0.0, 0.0
    for size in work.messages:
        done += size
        ready = work.backward * done / sum(work.messages)  # assumes that gradients become ready at a constant rate
        reduced = max(reduced, ready) + network.all_reduce(size, workers)
    return max(0.0, reduced - work.backward) + after


def _exposed_in_groups(work: StepTimes, sharding: Sharding, network: Interconnect, workers: int, passes: int) -> float:
    """The same of gathering weights and of scattering their gradients, group by group."""
    gathers, reductions = sharding.gathers(passes), sharding.reductions(passes)
    group, groups = sharding.split_workers(workers)
    half = sum(network.all_reduce(size, group) for size in work.messages) / 2
    gather = sum(network.all_reduce(sharding.share * size, group) for size in work.messages) / 2
    between = reductions * network.all_reduce_between(sum(work.messages) / group, group, groups)
    if network.inside.overlaps:
        ahead = gather * sharding.gathers_for_forward(passes) - passes * work.forward
        back = gather * sharding.gathers_for_backward(passes) + half * reductions + between - passes * work.backward
        return max(0.0, ahead) + max(0.0, back)
    if work.gather is not None and work.reduction is not None:
        return gathers * work.gather + reductions * work.reduction
    return gathers * gather + reductions * half + between


def step_seconds(work: StepTimes, network: Interconnect, workers: int, accumulation: int) -> float:
    """Seconds of one optimizer step with `accumulation` micro-batches on each worker."""
    passes = accumulation * (work.data + work.forward + work.backward)
    parts = work.sharding.split_workers(workers)[0] if work.sharding and work.gather is None else 1
    return passes + exposed_seconds(work, network, workers, accumulation) + work.commit / parts


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """The forecast for one number of workers."""

    workers: int
    global_batch: int
    passes: int  # micro-batches of a step on each worker
    step: float  # seconds of an optimizer step
    waiting: float  # seconds of its exposed communication
    samples_per_second: float
    speedup: float | None  # samples per second relative to one worker; None where the measurement was disturbed
    efficiency: float | None  # speedup / workers
    steps: int  # optimizer steps of the run; if the global batch grows, each has more samples
    seconds: float  # duration of the run
    cost: float | None  # of the run, if a price is given


def forecast(
    counts: Sequence[int],
    works: Sequence[StepTimes],
    network: Interconnect,
    base: BatchPlan,
    epochs: float,
    *,
    grows: bool,
    noise_scale: float | None = None,
    price: float | None = None,
) -> list[ForecastRow]:
    """Compute a row for each number of workers, from the times of one: on a CPU they share the cores.

    With a noise scale 𝓑, a run at global batch B takes (1 + 𝓑/B) / (1 + 𝓑/B₁) times the steps that it takes at B₁
    (McCandlish et al. 2018, eq. 2.11, at equal final loss), and so more samples: the row's time is that of the same
    result, not of the same number of samples.

    `base` has the batches of one worker, and with the epochs the length of its run. The global batch is the same for
    any number of workers, unless it `grows` with them; a step has at most all samples. The price is of one hour of one
    worker.
    """
    rows: list[ForecastRow] = []
    for workers, work in zip(counts, works, strict=True):
        plan = replace(base, global_batch=base.global_batch * (workers if grows else 1), workers=workers)
        passes = ceil(plan.num_micro_batches(0) / workers)
        step = step_seconds(work, network, workers, passes)
        steps = float(ceil(round(epochs * plan.steps_per_epoch, 6)))
        if noise_scale is not None:
            smaller, larger = (1 + noise_scale / each.global_batch for each in (plan, base))
            steps = epochs * base.steps_per_epoch * smaller / larger
        rate = plan.num_samples(0) / step
        first = rows[0].samples_per_second if rows else rate / workers
        seconds = steps * step
        row = ForecastRow(
            workers=workers,
            global_batch=plan.global_batch,
            step=step,
            passes=passes,
            waiting=exposed_seconds(work, network, workers, passes),
            samples_per_second=rate,
            speedup=rate / first,
            efficiency=rate / first / workers,
            steps=round(steps),
            seconds=seconds,
            cost=None if price is None else price * workers * seconds / 3600,
        )
        rows.append(row)
    return rows


def find_disturbance(rows: Sequence[ForecastRow], probes: Sequence[float]) -> str:
    """Why the forecast cannot be trusted, or "": other work on the machine slowed the worker on which it rests.

    The `probes` are seconds of a step of that worker, measured before and after everything else.
    """
    if probes and max(probes) > 4 / 3 * min(probes):
        return "a step of one worker took " + ", then ".join(f"{1e3 * seconds:.2f} ms" for seconds in probes)
    impossible = (row for row in rows if row.efficiency and row.efficiency > 1.1)
    return next((f"{row.workers} workers would have an efficiency of {row.efficiency:.0%}" for row in impossible), "")


def find_scaling_limit(rows: Sequence[ForecastRow]) -> int:
    """The number of workers beyond which the next row saves less than a tenth of the time."""
    ends = (row.workers for row, following in pairwise(rows) if following.seconds > 0.9 * row.seconds)
    return next(ends, rows[-1].workers)


def fit_ring_model(points: Sequence[tuple[float, float]], workers: int) -> tuple[float, float]:
    """Fit latency and bandwidth of the ring model to measured (bytes, seconds) by least squares of relative errors.

    Neither is negative: if the time does not grow with the size, only latency is fitted; if it is proportional to the
    size, only bandwidth.
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
