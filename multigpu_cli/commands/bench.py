"""bench: runs the real trainer on 1, 2, … workers in turns; where its time goes, and how far the forecast is off."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isnan, nan
from pathlib import Path
from typing import Any

import yaml
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multigpu_cli.capabilities import MULTI_PROCESS
from multigpu_cli.commands.bench_overlap import Overlap, measure_overlap, median_overlap
from multigpu_cli.commands.options import writing_to
from multigpu_cli.commands.plan.measure import measure_worker
from multigpu_cli.commands.plan.plan import NO_WIRE, forecast_rows, measure_interconnect
from multigpu_cli.commands.requests import parse_worker_counts
from multigpu_cli.config.resume_rules import replace_settings, without_setting
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import explicit_dump
from multigpu_cli.distributed.placement import count_cores, usable_gpus
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.faults.stop import interruptible
from multigpu_cli.launch import run_cli
from multigpu_cli.monitor.format import format_bytes, list_values
from multigpu_cli.monitor.history import load_history
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.monitor.pace import advise_on_data
from multigpu_cli.monitor.plot_style import STYLE, color_of_run, escape_text, save_png
from multigpu_cli.planning.speedup import ForecastRow, Interconnect
from multigpu_cli.run.assembly.components import TrainComponents

_STEPS, _SECONDS = 64, 4.0  # the least of a run without --steps
_LARGER_BATCH = "a larger --batch-size"
_KNOBS = {  # by share of a step: its name in the advice, and the remedies
    "wire": ("communication", _LARGER_BATCH, "--grad-accum-steps", "--grad-compression bf16", "faster links"),
    "stragglers": ("slow workers", "equal devices", "no other users on them", "even shares (--batch-size)"),
    "compute": ("the device itself", "--amp", "--compile", _LARGER_BATCH),
    "compute and wire": ("device and communication", _LARGER_BATCH, "--reshard step", "--amp", "faster links"),
}


@dataclass(frozen=True)
class BenchResult:
    """The measurements on one number of workers."""

    strategy: str
    workers: int
    global_batch: int
    step_ms: list[float]
    samples_per_second: float
    speedup: float
    efficiency: float
    utilisation: float | None  # of the GPUs, or of the CPU threads that the workers have, in per cent; None: unknown
    memory: float  # of the fullest worker, in bytes: its GPU's, or the whole process on a CPU
    shares: dict[str, float]  # of the time: data, wire (exposed), stragglers, compute; or data, "compute and wire"
    overlap: Overlap | None  # where the share of the wire comes from; None: from the wait for the last bucket
    forecast_ms: float | None  # plan's, the median of the repetitions; None for dp, which plan does not forecast
    error: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.step_ms)


@dataclass(frozen=True)
class Benchmark:
    """All results, and the setting whose change would help most."""

    about: dict[str, Any]
    rungs: list[BenchResult]
    knob: str
    notes: list[str]


def choose_worker_counts(text: str | None, config: Config) -> list[int]:
    """The requested numbers of workers, or powers of two up to the number of GPUs, or cores, that may be used here."""
    gpus = len(usable_gpus(config.device))
    most = gpus or min(count_cores(), 8)
    if text is None:
        return [2**power for power in range(most.bit_length()) if 2**power <= most]
    counts = parse_worker_counts(text)
    if gpus and counts[-1] > gpus:
        raise RequestError(f"--workers {text}: only {pluralize(gpus, 'device')} can be used")
    return counts


@interruptible()
def run_benchmark(
    config: Config, workers: list[int], steps: int | None, repetitions: int, environ: Mapping[str, str]
) -> Benchmark:
    """Run the trainer on each number of workers, repetition by repetition, and compare with the forecast."""
    reason = why_no_dp(config)
    several = "fsdp" if config.device.multi_gpu == "fsdp" else "ddp"
    sides = [(several if count > 1 else "single", count) for count in workers]
    sides += [] if reason else [("dp", count) for count in workers if count > 1]
    runs_of: dict[tuple[str, int], list[dict[str, float]]] = {side: [] for side in sides}
    overlaps: dict[int, list[Overlap | None]] = {count: [] for count in workers}
    forecasts: dict[int, list[ForecastRow]] = {count: [] for count in workers}
    wires = {1: NO_WIRE}
    length = steps or 0
    with tempfile.TemporaryDirectory(prefix="multigpu-bench-") as name:
        for repetition in range(repetitions):
            for strategy, count in sides:
                if strategy != "dp":  # just before the run, so that other load on this machine disturbs both equally
                    alone = measure_worker(config, [count])
                    if alone.wire or count not in wires:  # between idle processes it is measured once
                        wires[count] = alone.wire or measure_interconnect(count, config.device)
                    forecasts[count] += forecast_rows(alone, config, [count], Interconnect(wires[count]))
                length = length or max(_STEPS, ceil(_SECONDS / forecasts[count][0].step))
                folder = Path(name, f"{strategy}-{count}-{repetition}")
                runs_of[strategy, count].append(run_trainer(config, strategy, count, length, folder, environ))
            for count in workers:
                overlaps[count].append(measure_overlap(config, count))
    rungs: list[BenchResult] = []
    for (strategy, count), runs in runs_of.items():
        first = rungs[0].samples_per_second if rungs else None
        hidden = median_overlap(overlaps[count]) if strategy == "ddp" else None
        rungs.append(_summarize_runs(strategy, runs, forecasts[count], hidden, first))
    about = {
        "model": alone.components.spec.model,
        "data": config.data.name,
        "device": alone.components.plan.device,
        "steps": ceil(length / WINDOWS) * WINDOWS,
        "repetitions": repetitions,
        "wire": wires[max(workers)].rests_on,
    }
    notes = [f"no DataParallel: {reason}"] if reason else []
    return Benchmark(about, rungs, _choose_advice(rungs, config, alone.components), notes)


def why_no_dp(config: Config) -> str:
    """Why nn.DataParallel is not measured; "" where it is."""
    if config.device.multi_gpu == "fsdp":
        return "--multi-gpu fsdp is measured instead"
    if (gpus := len(usable_gpus(config.device))) < 2:
        return f"it needs two GPUs, and there is {gpus or 'none'} to use"
    if config.model.compile != "off":
        return "it can't be compiled"
    return "it can't be --exact" if config.reproducibility.exact else ""


def _summarize_runs(
    strategy: str,
    runs: Sequence[Mapping[str, float]],
    rows: Sequence[ForecastRow],
    hidden: Overlap | None,
    first: float | None,
) -> BenchResult:
    """The medians over the repetitions, with their forecasts; `first` is the first result's rate, None for itself."""
    times, row = [each["step_ms"] for each in runs], rows[0]
    median = statistics.median(times)
    forecast = None if strategy == "dp" else 1e3 * statistics.median(row.step for row in rows)
    rate = 1e3 * row.samples_per_second * row.step / median
    gain = rate / first if first else float(row.workers)
    waits = ("data",) if strategy == "fsdp" else ("data", "wire", "stragglers")
    shares = {name: statistics.median(each[name] for each in runs) for name in waits}
    if hidden:
        shares["wire"] = max(0.0, hidden.exposed) / median
    shares["compute and wire" if strategy == "fsdp" else "compute"] = max(0.0, 1 - sum(shares.values()))
    busy = statistics.median(each["utilisation"] for each in runs)
    return BenchResult(
        strategy=strategy,
        workers=row.workers,
        global_batch=row.global_batch,
        step_ms=times,
        samples_per_second=rate,
        speedup=gain,
        efficiency=gain / row.workers,
        utilisation=None if isnan(busy) else busy,
        memory=statistics.median(each["memory"] for each in runs),
        shares=shares,
        overlap=hidden,
        forecast_ms=forecast,
        error=None if forecast is None else (forecast - median) / median,
    )


def make_output_dir(out: str) -> Path:
    """Make the folder for bench.json and bench.png, before minutes of measuring."""
    folder = Path(out)
    with writing_to("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder


def write_files(benchmark: Benchmark, folder: Path) -> list[Path]:
    """Write bench.json and bench.png into a folder."""
    data, plot = folder / "bench.json", folder / "bench.png"
    with writing_to("--out", folder):
        data.write_text(dump_json(benchmark, indent=1) + "\n")
        plot.write_bytes(draw_benchmark(benchmark.rungs, str(benchmark.about["model"])))
    return [data, plot]


def format_benchmark(benchmark: Benchmark, files: Sequence[Path]) -> Iterator[str]:
    """The table, the comparison with the forecast, and the advice."""
    about = benchmark.about
    runs = f"{pluralize(about['repetitions'], 'run')} of {pluralize(about['steps'], 'step')}"
    yield f"{about['model']} on {about['data']}, {about['device']}: {runs}"
    yield f"wire: {about['wire']}"
    head = f"{'workers':>12}{'step (lowest to highest)':>32}{'samples/s':>12}"
    yield f"{head}{'speedup':>9}{'efficiency':>12}{'forecast':>12}"
    for rung in benchmark.rungs:
        spread = f"{rung.median:.2f} ms ({min(rung.step_ms):.2f} to {max(rung.step_ms):.2f})"
        gain = f"{rung.samples_per_second:>12,.0f}{rung.speedup:>9.2f}{rung.efficiency:>12.0%}"
        error = "" if rung.error is None else f"{rung.error:>+12.0%}"
        yield f"{f'{rung.strategy} {rung.workers}':>12}{spread:>32}{gain}{error}"
        shares = ", ".join(f"{share:.0%} {name}" for name, share in rung.shares.items())
        busy = "" if rung.utilisation is None else f"; devices busy {rung.utilisation:.0f} % of the time"
        yield f"{'':>12}  {shares}{busy}; at most {format_bytes(rung.memory)} of memory in a worker"
        if rung.overlap:
            one, left = rung.overlap.reduction, rung.overlap.exposed
            yield f"{'':>12}  a reduction after backward takes {one:.2f} ms; overlapped with it, {left:.2f} ms are left"
    yield f"what would help most: {benchmark.knob}"
    yield from (f"note: {note}" for note in benchmark.notes)
    yield from (f"written: {file}" for file in files)


def _choose_advice(rungs: Sequence[BenchResult], config: Config, components: TrainComponents) -> str:
    """Return what would shorten a step on the most workers, without settings that are used or have no effect."""
    plan, location = components.plan, components.loaders.train.data_location
    *_, rung = (each for each in rungs if each.strategy != "dp")
    used = {"--amp": plan.precision != "off", "--compile": config.model.compile != "off"}
    used["--grad-compression bf16"] = config.reproducibility.exact or config.communication.grad_compression != "none"
    used["--reshard step"] = config.device.reshard == "step"
    knobs = _KNOBS | {"data": ("data", advise_on_data(location, plan.device) or "a faster source")}
    *waits, rest = rung.shares
    name = max(waits, key=lambda wait: rung.shares[wait])
    if rung.shares[name] <= 0.1:
        name = rest
    label, *remedies = knobs[name]
    remedy = ", ".join(each for each in remedies if not used.get(each))
    return f"{label}: {remedy} ({rung.shares[name]:.0%} of the time with {pluralize(rung.workers, 'worker')})"


WINDOWS = 8  # of a run, the first of which is warm-up
_ENDLESS = 1_000_000  # epochs
_FIELDS = {"step_ms": "step_ms", "data": "data_wait_share", "wire": "comm_share", "stragglers": "straggler_share"}


def run_trainer(
    config: Config, strategy: str, workers: int, steps: int, folder: Path, environ: Mapping[str, str]
) -> dict[str, float]:
    """Run the real trainer for some steps; medians over its journal's windows but the first one, NaN where unknown."""
    config = without_setting(config, "nproc_per_node")
    interval = ceil(steps / WINDOWS)  # so that all windows together have at least the number that was asked for
    changes: dict[str, Any] = {
        "multi_gpu": "none" if strategy == "single" else strategy,
        "epochs": _ENDLESS,
        "max_steps": interval * WINDOWS,
        "log_interval": interval,
        "logger": [],
        "save_dir": str(folder),
        "resume": "never",
        "mirror": None,
        "checkpoint_every": str(_ENDLESS),
        "warmup_epochs": 0.0,
    }
    if strategy in MULTI_PROCESS:
        changes["nproc_per_node"] = workers
    if ids := config.device.gpu_ids or (range(workers) if strategy == "dp" else ()):
        changes["gpu_ids"] = list(ids[:workers])
    changed = replace(replace_settings(config, changes), explicit=config.explicit | changes.keys())
    request = folder.with_suffix(".yaml")
    request.write_text(yaml.safe_dump(explicit_dump(changed)))
    run_cli(["--config", str(request), "--quiet"], environ)
    lines = [line for _, line in sorted(load_history(folder).train.items())][1:]
    medians = {name: statistics.median(line.get(field) or 0.0 for line in lines) for name, field in _FIELDS.items()}
    busy = []
    for line in lines:
        used = list_values(line.get("gpu_utilisation") or line["cpu_utilisation"])
        known = [value for value in used if value is not None]
        busy += [statistics.fmean(known)] if known else []
    utilisation = statistics.median(busy) if busy else nan
    return medians | {"memory": max(list_values(lines[-1]["memory"])), "utilisation": utilisation}


_SHADES = {
    "compute": "#9fc3da",
    "compute and wire": "#5f93ad",
    "data": "#e0a458",
    "wire": "#d1495b",
    "stragglers": "#7b4fa3",
}


def _draw_time_and_speedup(time: Axes, speed: Axes, rungs: list[BenchResult], of_dp: list[BenchResult]) -> None:
    """Draw the step times (each turn a point) with their forecast, and the speedups with the ideal ones."""
    names = [str(rung.workers) for rung in rungs]
    for index, rung in enumerate(rungs):
        time.plot([index] * len(rung.step_ms), rung.step_ms, "o", color=color_of_run(0), alpha=0.4, markersize=5)
    time.plot(names, [rung.median for rung in rungs], "-", color=color_of_run(0), label="measured")
    forecast = [nan if rung.forecast_ms is None else rung.forecast_ms for rung in rungs]
    time.plot(names, forecast, "--s", color=color_of_run(1), label="forecast", markersize=4)
    time.set(title="Time of an optimizer step", ylabel="milliseconds")
    speed.plot(names, [rung.speedup for rung in rungs], "-o", color=color_of_run(0), label="measured")
    speed.plot(names, [rung.workers for rung in rungs], ":", color="#9aa5ae", label="ideal")
    speed.set(title="Speedup", ylabel="over one worker")
    if of_dp:
        workers = [str(rung.workers) for rung in of_dp]
        look: dict[str, Any] = {"color": color_of_run(2), "label": "DataParallel", "markersize": 4}
        time.plot(workers, [rung.median for rung in of_dp], "-^", **look)
        speed.plot(workers, [rung.speedup for rung in of_dp], "-^", **look)


def draw_benchmark(rungs: Sequence[BenchResult], title: str) -> bytes:
    """Return a PNG file of four charts; nn.DataParallel, if it was measured, is a line of its own in the first two."""
    of_dp = [rung for rung in rungs if rung.strategy == "dp"]
    rungs = [rung for rung in rungs if rung.strategy != "dp"]
    names = [str(rung.workers) for rung in rungs]
    with rc_context(STYLE):
        figure = Figure(figsize=(8.8, 6.0), layout="constrained")
        (time, speed), (use, parts) = figure.subplots(2, 2)
        _draw_time_and_speedup(time, speed, rungs, of_dp)
        efficiency = [100 * rung.efficiency for rung in rungs]
        use.bar(names, efficiency, color=color_of_run(0), width=0.5, label="efficiency")
        known = [(str(rung.workers), rung.utilisation) for rung in rungs if rung.utilisation is not None]
        if known:
            use.plot(*zip(*known, strict=True), "-D", color=color_of_run(1), label="utilisation of the devices")
        use.set(title="Efficiency and utilisation", ylabel="per cent")
        below = [0.0] * len(rungs)
        for part, shade in _SHADES.items():
            if not any(part in rung.shares for rung in rungs):
                continue
            heights = [100 * rung.shares.get(part, 0.0) for rung in rungs]
            parts.bar(names, heights, bottom=below, color=shade, label=part, width=0.5)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        parts.set(title="Where the time goes", ylabel="per cent")
        parts.legend(loc="lower left", ncols=2, frameon=True)
        for axes in (time, speed, use, parts):
            axes.set(xlabel="workers", ylim=(0, None))
            axes.grid(visible=False, axis="x")
        time.legend(loc="lower left")
        speed.legend(loc="lower right")
        use.set_ylim(top=1.25 * use.get_ylim()[1])
        use.legend(loc="upper left", ncols=2)
        figure.suptitle(escape_text(title), fontweight="bold")
        return save_png(figure)
