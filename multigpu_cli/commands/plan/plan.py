"""plan: memory, time and cost of a run on 1, 2, 4, … workers, forecast from measurements of one worker."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.commands.doctor.bandwidth import measure_in_workers
from multigpu_cli.commands.options import writing_to
from multigpu_cli.commands.plan.from_config import FILLED, ConfigEstimate, estimate_training
from multigpu_cli.commands.plan.measure import SingleWorkerProfile, measure_worker
from multigpu_cli.commands.requests import parse_option, parse_worker_counts
from multigpu_cli.config.schema import Config, DeviceConfig
from multigpu_cli.config.types import integer, number
from multigpu_cli.distributed.placement import Placement, count_cores, cuda_devices, usable_gpus
from multigpu_cli.errors import RequestError, did_you_mean, pluralize
from multigpu_cli.faults.stop import interruptible
from multigpu_cli.monitor.format import format_bytes, format_duration
from multigpu_cli.monitor.history import PLAN
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.planning.memory import Memory, ShardedRow, forecast_sharded
from multigpu_cli.planning.speedup import (
    ASSUMED,
    BETWEEN_MACHINES,
    ForecastRow,
    Interconnect,
    Link,
    find_disturbance,
    find_scaling_limit,
    forecast,
)

NO_WIRE = Link("none", 0.0, inf, "one worker needs none")
_PHASES = {"data": "data", "forward": "forward", "backward": "backward", "commit": "optimizer"}


@dataclass(frozen=True)
class PlanRequest:
    """The options of plan: a price of one worker's hour, a noise scale in samples; without interconnect it chooses."""

    interconnect: str | None
    workers: list[int]
    price: float | None
    noise_scale: float | None
    per_node: int


@dataclass(frozen=True)
class Forecast:
    """A plan, and the measurements and assumptions behind it."""

    about: dict[str, Any]
    memory: Memory
    micro_batch: int
    capacity: int | None
    rows: list[ForecastRow]
    notes: list[str]
    sharded: list[ShardedRow]


def parse_plan_request(
    interconnect: str | None, workers: str, price: str | None, noise_scale: str | None, per_node: str
) -> PlanRequest:
    """Read the options as they were typed."""
    if interconnect is not None and interconnect not in (known := ["measured", *ASSUMED]):
        raise RequestError(f"--interconnect {interconnect} is not known", remedy=did_you_mean(interconnect, known))
    return PlanRequest(
        interconnect,
        parse_worker_counts(workers),
        parse_option(number(0, above=True), "--price-per-gpu-hour", price),
        parse_option(number(0, above=True), "--noise-scale", noise_scale),
        parse_option(integer(1), "--gpus-per-node", per_node),
    )


@interruptible()
def make_plan(config: Config, request: PlanRequest) -> Forecast:
    """Measure one worker and the wire, and forecast other numbers of workers."""
    if estimate := estimate_training(config):
        return _as_forecast(estimate, config)
    alone = measure_worker(config, request.workers)
    network, rests_on = _choose_network(request, alone)
    rows = forecast_rows(alone, config, request.workers, network, noise_scale=request.noise_scale, price=request.price)
    components, device = alone.components, alone.components.world.device
    about = {
        "model": components.spec.model,
        "data": config.data.name,
        "device": components.plan.device,
        "precision": components.state.precision.name,
        "parameters": sum(p.numel() for p in components.state.model.parameters()),
        "trained": sum(p.numel() for p in components.strategy.local_parameters),
        "flops_per_sample": alone.flops_per_sample,
        "wire": rests_on,
        "works": alone.works,
    }
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    notes = [*_collect_notes(alone, config, request, rows), *note_too_large(alone.memory, capacity)]
    if disturbance := find_disturbance(rows, alone.probes):
        rows = [replace(row, speedup=None, efficiency=None) for row in rows]
        notes.insert(0, f"other work disturbed the measurement ({disturbance}): run plan again on a quiet machine")
    sharding = alone.sharding
    sharded = [forecast_sharded(alone.memory, sharding, row.workers, row.passes) for row in rows] if sharding else []
    return Forecast(about, alone.memory, components.plan.batches.micro_batch, capacity, rows, notes, sharded)


def _as_forecast(estimate: ConfigEstimate, config: Config) -> Forecast:
    about = {
        "model": str(estimate.folder),
        "data": "rows of text",
        "parameters": estimate.parameters,
        "trained": estimate.trained,
        "device": estimate.device,
        "tokens": estimate.tokens,
        "activations_counted": not estimate.activations,
        "works": {},
    }
    notes = list(estimate.describe())
    if config.checkpoint.save_dir is not None:
        notes.append("--save-dir: nothing is written there, since a report compares a run with measured plans only")
    return Forecast(about, estimate.memory, estimate.rows, estimate.capacity, [], notes, [])


def forecast_rows(
    alone: SingleWorkerProfile, config: Config, counts: list[int], network: Interconnect, **more: float | None
) -> list[ForecastRow]:
    """The forecast for these numbers of workers; `more` is a noise scale or a price."""
    batches, fixed = alone.components.plan.batches, config.batch.global_size
    least = fixed or batches.micro_batch * (config.batch.grad_accum_steps or 1)
    epochs = alone.components.plan.schedule.total_steps / batches.steps_per_epoch
    works, base = [alone.works[count] for count in counts], replace(batches, global_batch=least, workers=1)
    return forecast(counts, works, network, base, epochs, grows=not fixed, **more)


def measure_interconnect(workers: int, device: DeviceConfig) -> Link:
    """The wire between the GPUs that a run may use here, or between idle processes on the CPU.

    With --multi-gpu fsdp an all-gather and a reduce-scatter count as one all-reduce, of which they are the halves.
    """
    ids = usable_gpus(device)
    devices = (torch.device("cpu"),) * max(2, min(workers, count_cores()))
    if len(ids) > 1:
        devices = cuda_devices(ids[:workers])
    measured = measure_in_workers(Placement("ddp", devices, len(devices), "plan"))
    points, how = [(8.0, measured["latency"]), *map(tuple, measured["by_size"])], measured["backend"]
    if device.multi_gpu == "fsdp":
        how += ", all-gather and reduce-scatter"
        halves = zip(*measured["halves"].values(), strict=True)
        points = [(size, one + other) for (size, one), (_, other) in halves]  # one after the other
    return Link.from_measurements(how, len(devices), points, overlaps=len(ids) > 1)


def save_plan(forecast: Forecast, folder: Path) -> None:
    """Store the plan where the run will be, for its report to compare."""
    with writing_to("--save-dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        publish(folder / PLAN, dump_json(forecast, indent=1).encode())


def _choose_network(request: PlanRequest, alone: SingleWorkerProfile) -> tuple[Interconnect, str]:
    chosen, device = request.interconnect, alone.components.spec.config.device
    if max(request.workers) == 1:
        return Interconnect(NO_WIRE), NO_WIRE.rests_on
    if chosen is None:
        chosen = "pcie4" if len(usable_gpus(device)) == 1 else "measured"
    if chosen in BETWEEN_MACHINES and max(request.workers) > request.per_node:
        inside, between = ASSUMED["nvlink4"], ASSUMED[chosen]
        rests_on = f"assumed: {between.rests_on} between machines of {request.per_node}; {inside.rests_on} within"
        return Interconnect(inside, between, request.per_node), rests_on
    if chosen == "measured":
        wire = alone.wire or measure_interconnect(max(request.workers), device)
        return Interconnect(wire), wire.rests_on
    return Interconnect(ASSUMED[chosen]), f"assumed: {ASSUMED[chosen].rests_on}"


def _collect_notes(
    alone: SingleWorkerProfile, config: Config, request: PlanRequest, rows: list[ForecastRow]
) -> Iterator[str]:
    if alone.note:
        yield alone.note
    if alone.components.world.device.type == "cpu" and max(request.workers) > count_cores():
        yield f"rows with more workers than the {count_cores()} cores here assume a machine with a core for each worker"
    if config.batch.global_size is None and request.noise_scale is None:
        yield "the global batch grows with the workers: fewer steps may not reach the same loss (--noise-scale)"
    if config.communication.grad_compression == "powersgd":
        yield "PowerSGD sends less than this: the forecast counts whole gradients, as in PowerSGD's first steps"
    for at, text in enumerate(alone.components.plan.notes.get("hooks", ()), 1):
        yield f"hook {at} is not called here, and so in none of these times: {text}"
    end = find_scaling_limit(rows)
    if end < rows[-1].workers:
        yield f"beyond {pluralize(end, 'worker')}, the next row saves less than a tenth of the time"


def note_too_large(memory: Memory, capacity: int | None) -> Iterator[str]:
    """What to do where a device can't hold what ddp needs on each."""
    if capacity and not memory.largest_batch(FILLED * capacity):
        yield (
            f"{format_bytes(memory.total_bytes(1))} with a single sample do not fit {format_bytes(capacity)}: "
            "--multi-gpu fsdp divides weights, gradients and the optimizer's state over the workers"
        )


def format_plan(forecast: Forecast) -> Iterator[str]:
    """Memory, measured times and the table of the forecast."""
    about, memory, size = forecast.about, forecast.memory, forecast.micro_batch
    frozen = about["parameters"] - about["trained"]
    count = f"{about['parameters']:,} parameters" + f" ({about['trained']:,} trained, {frozen:,} frozen)" * bool(frozen)
    yield f"{about['model']} on {about['data']}, {count}, {about['device']}"
    parts = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}
    listed = ", ".join(f"{format_bytes(value)} {name}" for name, value in parts.items())
    stored = f"{format_bytes(memory.activations(size))} kept for backward by a micro-batch of {size}"
    if not forecast.rows:
        yield from _format_estimate(forecast, listed)
        return
    yield f"memory   {format_bytes(memory.total_bytes(size))} a device: {listed}, {stored}"
    if forecast.capacity:
        fits = memory.largest_batch(FILLED * forecast.capacity)
        total = format_bytes(forecast.capacity)
        yield f"         of {total}; 9 tenths of them would hold micro-batches of {fits} (forecast)"
    yield from _format_sharded(forecast)
    for count, work in about["works"].items():
        times = ", ".join(f"{1e3 * getattr(work, name):.2f} ms {called}" for name, called in _PHASES.items())
        yield f"measured {times} for each of {count}"
        if work.gather is not None:
            sent = {"gather all weights once": work.gather, "reduce all gradients": work.reduction}
            yield "         " + ", ".join(f"{1e3 * seconds:.2f} ms to {name}" for name, seconds in sent.items())
    yield f"         {about['flops_per_sample'] / 1e6:.4g} MFLOP a sample"
    yield f"network  {about['wire']}"
    yield "forecast, not measured:"
    head = f"{'workers':>8}{'batch':>8}{'step':>12}{'comm':>10}{'samples/s':>12}{'speedup':>9}{'efficiency':>12}"
    yield f"{head}{'run':>14}  cost"
    for row in forecast.rows:
        cost = "" if row.cost is None else f"  {row.cost:.2f}"
        times = f"{1e3 * row.step:>9.2f} ms{1e3 * row.waiting:>7.2f} ms{row.samples_per_second:>12,.0f}"
        gain = " " * 20 if row.efficiency is None else f"{row.speedup:>9.2f}{row.efficiency:>11.0%}"
        yield f"{row.workers:>8}{row.global_batch:>8}{times}{gain} {format_duration(row.seconds):>14}{cost}"
    yield from (f"note: {note}" for note in forecast.notes)


def _format_estimate(forecast: Forecast, listed: str) -> Iterator[str]:
    """Memory that was computed, where nothing could be measured."""
    memory, capacity = forecast.memory, forecast.capacity
    of_all = f" of {format_bytes(capacity)}" if capacity else ""
    yield f"memory   {format_bytes(memory.weights + memory.gradients + memory.optimizer)}{of_all} a device: {listed}"
    if forecast.about["activations_counted"]:
        rows = f"{pluralize(forecast.micro_batch, 'row')} of {forecast.about['tokens']:,} tokens"
        kept = format_bytes(memory.activations(forecast.micro_batch))
        yield f"         {kept} more kept for backward by a micro-batch of {rows} (computed)"
        if capacity:
            fits = memory.largest_batch(FILLED * capacity)
            yield f"         9 tenths of {format_bytes(capacity)} would hold micro-batches of {fits} (computed)"
    yield from (f"note: {note}" for note in forecast.notes)


def _format_sharded(forecast: Forecast) -> Iterator[str]:
    """Memory and traffic with --multi-gpu fsdp, and what the forecast takes for granted."""
    if not forecast.sharded:
        return
    yield "fsdp     forecast, not measured: equal parts of the state, two blocks gathered at a time, a ring of workers"
    for row in forecast.sharded:
        memory, activations = row.memory, row.memory.activations(forecast.micro_batch)
        state = memory.weights + memory.optimizer + memory.gradients
        parts = {"state": state, "gathered": memory.unsharded, "kept for backward": activations}
        listed = ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items())
        yield (
            f"{row.workers:>8} {format_bytes(memory.total_bytes(forecast.micro_batch))} a device: {listed}; "
            f"a step of {pluralize(row.passes, 'micro-batch')} sends {format_bytes(row.sent)} "
            f"(ddp {format_bytes(row.sent_by_ddp)})"
        )
