"""bench: the real trainer on 1, 2, … workers, interleaved; where its time goes, and how far the forecast was off."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, isnan, nan
from pathlib import Path
from typing import Any

import yaml

from multigpu_cli.commands.bench.overlap import Overlap, measure_overlap, median_overlap
from multigpu_cli.commands.bench.plot import draw_benchmark
from multigpu_cli.commands.plan.measure import measure_worker
from multigpu_cli.commands.plan.plan import NO_WIRE, forecast_rows, measure_interconnect
from multigpu_cli.config.resume_rules import replace_settings, without_setting
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import explicit_dump
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.launch import run_cli
from multigpu_cli.monitor.history import load_history
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.planning.speedup import ForecastRow, Interconnect
from multigpu_cli.runtime.device_placement import count_cores, usable_gpus

_LINES = 8  # windows of a run, the first of which is warm-up
_STEPS, _SECONDS = 64, 4.0  # of a run at least, where nobody says how long it should be
_ENDLESS = 1_000_000  # epochs
_KNOBS = {
    "data": "data: more --num-workers, a TensorDataset, or --data-on-device on",
    "wire": "the wire: a larger --batch-size, --grad-accum-steps, --grad-compression bf16, or faster links",
    "stragglers": "slow workers: equal GPUs, nobody else on them, and even shares (--batch-size)",
    "compute": "the device itself: --amp, --compile, a larger --batch-size",
}


@dataclass(frozen=True)
class BenchResult:
    """One number of workers, measured.

    Attributes:
        strategy: single, ddp or dp, whose devices are its workers.
        step_ms: the medians of the repetitions.
        utilisation: of the GPUs, or of the CPU threads that the workers have, in per cent; None: unknown.
        shares: of the time: data, wire (exposed), stragglers, compute.
        overlap: what the share of the wire rests on; None: on the wait of the last bucket.
        forecast_ms: what plan says, the median of the repetitions, and error: (forecast - measured) / measured; plan
            knows nothing of dp.
    """

    strategy: str
    workers: int
    global_batch: int
    step_ms: list[float]
    samples_per_second: float
    speedup: float
    efficiency: float
    utilisation: float | None
    shares: dict[str, float]
    overlap: Overlap | None
    forecast_ms: float | None
    error: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.step_ms)


@dataclass(frozen=True)
class Benchmark:
    """What was measured."""

    about: dict[str, Any]
    rungs: list[BenchResult]
    knob: str
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_worker_counts(text: str | None, config: Config) -> list[int]:
    """Numbers of workers: those asked for, or powers of two up to the GPUs, or the cores, that may be used here."""
    gpus = len(usable_gpus(config.device))
    most = gpus or min(count_cores(), 8)
    if text is None:
        return [2**power for power in range(most.bit_length()) if 2**power <= most]
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError as error:
        raise RequestError(f"--workers {text}", remedy="numbers, as 1,2,4") from error
    if numbers[0] < 1 or (gpus and numbers[-1] > gpus):
        raise RequestError(f"--workers {text}: only {pluralize(gpus or count_cores(), 'device')} to use")
    return sorted({1, *numbers})


def run_benchmark(
    config: Config, workers: list[int], steps: int | None, repetitions: int, environ: Mapping[str, str]
) -> Benchmark:
    """Run the trainer, repetition by repetition on each number of workers, forecast the same and compare.

    Args:
        workers: from one on. steps: of each run; None: some seconds of them.

    Raises:
        WorkersFailed: a run failed.
        RequestError, TrainingError: as a training would.
    """
    reason = why_no_dp(config)
    sides = [("ddp" if count > 1 else "single", count) for count in workers]
    sides += [] if reason else [("dp", count) for count in workers if count > 1]
    runs_of: dict[tuple[str, int], list[dict[str, float]]] = {side: [] for side in sides}
    overlaps: dict[int, list[Overlap | None]] = {count: [] for count in workers}
    forecasts: dict[int, list[ForecastRow]] = {count: [] for count in workers}
    wires = {1: NO_WIRE}
    length = steps or 0
    with tempfile.TemporaryDirectory(prefix="multigpu-bench-") as name:
        for repetition in range(repetitions):
            for strategy, count in sides:
                if strategy != "dp":  # beside the run: whatever else is at work here disturbs both alike
                    alone = measure_worker(config, [count])
                    if alone.wire or count not in wires:  # one that is idle is measured once
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
        "steps": _window_steps(length) * _LINES,
        "repetitions": repetitions,
        "wire": wires[max(workers)].rests_on,
    }
    notes = [f"no DataParallel: {reason}"] if reason else []
    return Benchmark(about, rungs, _choose_advice([rung for rung in rungs if rung.strategy != "dp"][-1]), notes)


def why_no_dp(config: Config) -> str:
    """Why nn.DataParallel is not measured too; "" where it is."""
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
    """The medians over the repetitions.

    Args:
        rows: the forecast for as many workers, of each repetition.
        first: samples per second of the first rung.
    """
    times = [each["step_ms"] for each in runs]
    median, forecast = statistics.median(times), 1e3 * statistics.median(row.step for row in rows)
    row = rows[0]
    rate = 1e3 * row.samples_per_second * row.step / median
    gain = rate / first if first else float(row.workers)
    shares = {name: statistics.median(each[name] for each in runs) for name in ("data", "wire", "stragglers")}
    if hidden:
        shares["wire"] = max(0.0, hidden.exposed) / median
    shares["compute"] = max(0.0, 1 - sum(shares.values()))
    busy = statistics.median(each["utilisation"] for each in runs)
    known = strategy != "dp"
    return BenchResult(
        strategy=strategy,
        workers=row.workers,
        global_batch=row.global_batch,
        step_ms=times,
        samples_per_second=rate,
        speedup=gain,
        efficiency=gain / row.workers,
        utilisation=None if isnan(busy) else busy,
        shares=shares,
        overlap=hidden,
        forecast_ms=forecast if known else None,
        error=(forecast - median) / median if known else None,
    )


def run_trainer(
    config: Config, strategy: str, workers: int, steps: int, folder: Path, environ: Mapping[str, str]
) -> dict[str, float]:
    """The real trainer for some steps; medians of its journal's windows, the first left out."""
    config = without_setting(config, "nproc_per_node")
    device: dict[str, Any] = {"multi_gpu": "none" if strategy == "single" else strategy}
    if strategy == "ddp":
        device["nproc_per_node"] = workers
    if ids := config.device.gpu_ids or (range(workers) if strategy == "dp" else ()):
        device["gpu_ids"] = list(ids[:workers])
    interval = _window_steps(steps)
    length = {"epochs": _ENDLESS, "max_steps": interval * _LINES, "log_interval": interval}
    quiet = {"save_dir": str(folder), "resume": "never", "checkpoint_every": str(_ENDLESS), "warmup_epochs": 0.0}
    changed = replace_settings(config, device | length | quiet)
    changed = replace(changed, explicit=config.explicit | device.keys() | length.keys() | quiet.keys())
    request = folder.with_suffix(".yaml")
    request.write_text(yaml.safe_dump(explicit_dump(changed)))
    run_cli(["--config", str(request), "--quiet"], environ)
    lines = [line for _, line in sorted(load_history(folder).train.items())][1:]
    medians = {name: statistics.median(line.get(field) or 0.0 for line in lines) for name, field in _FIELDS.items()}
    means = [_mean_of_known(line.get("gpu_utilisation") or line["cpu_utilisation"]) for line in lines]
    busy = [mean for mean in means if not isnan(mean)]
    return medians | {"utilisation": statistics.median(busy) if busy else nan}


def _window_steps(steps: int) -> int:
    """Steps of one window: so many windows have at least as many steps as were asked for."""
    return ceil(steps / _LINES)


_FIELDS = {"step_ms": "step_ms", "data": "data_wait_share", "wire": "comm_share", "stragglers": "straggler_share"}


def _mean_of_known(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else nan


def make_output_dir(out: str) -> Path:
    """The folder for bench.json and bench.png, made before minutes of measuring.

    Raises:
        RequestError: it can't be made, or not be written into.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise _not_writable(folder, error) from error


def write_files(benchmark: Benchmark, folder: Path) -> list[Path]:
    """bench.json and bench.png in a folder.

    Raises:
        RequestError: they can't be written.
    """
    try:
        (folder / "bench.json").write_text(dump_json(benchmark.as_dict(), indent=1) + "\n")
        (folder / "bench.png").write_bytes(
            draw_benchmark([asdict(rung) for rung in benchmark.rungs], str(benchmark.about["model"]))
        )
    except OSError as error:
        raise _not_writable(folder, error) from error
    return [folder / "bench.json", folder / "bench.png"]


def _not_writable(folder: Path, error: OSError) -> RequestError:
    return RequestError(f"--out {folder}: {error.strerror or error}", remedy="another --out")


def print_benchmark(benchmark: Benchmark, files: Sequence[Path], *, as_json: bool) -> None:
    """Print the table, the comparison with the forecast, and the knob."""
    print(dump_json(benchmark.as_dict(), indent=2) if as_json else "\n".join(_format_benchmark(benchmark, files)))


def _format_benchmark(benchmark: Benchmark, files: Sequence[Path]) -> Iterator[str]:
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
        yield f"{'':>12}  {shares}{busy}"
        if rung.overlap:
            one, left = rung.overlap.reduction, rung.overlap.exposed
            yield f"{'':>12}  a reduction after backward takes {one:.2f} ms; overlapped with it, {left:.2f} ms are left"
    yield f"what would help most: {benchmark.knob}"
    yield from (f"note: {note}" for note in benchmark.notes)
    yield from (f"written: {file}" for file in files)


def _choose_advice(rung: BenchResult) -> str:
    waits = {name: share for name, share in rung.shares.items() if name != "compute"}
    worst = max(waits, key=lambda name: waits[name])
    name = worst if waits[worst] > 0.1 else "compute"
    return f"{_KNOBS[name]} ({rung.shares[name]:.0%} of the time with {pluralize(rung.workers, 'worker')})"
