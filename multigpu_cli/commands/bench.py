"""bench: the real trainer on 1, 2, … workers, interleaved; where its time goes, and how far the forecast was off."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from multigpu_cli.commands.bench_figure import drawn
from multigpu_cli.commands.plan import forecast_of, measured_wire
from multigpu_cli.commands.plan_measure import Alone, measured, typical
from multigpu_cli.config.pinned import with_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import explicit_dump
from multigpu_cli.errors import RequestError, counted
from multigpu_cli.launch import run_alone
from multigpu_cli.monitor.history import history_of
from multigpu_cli.monitor.journal import valid_json
from multigpu_cli.planning.speedup import Network, Wire
from multigpu_cli.runtime.devices import cores, visible_gpus

_LINES = 8  # windows of a run, the first of which is warm-up
_ENDLESS = 1_000_000  # epochs
_NO_WIRE = Wire("none", 0.0, float("inf"), "one worker needs none")
_KNOBS = {
    "data": "data: more --num-workers, a TensorDataset, or --data-on-device on",
    "wire": "the wire: a larger --batch-size, --grad-accum-steps, --grad-compression bf16, or faster links",
    "stragglers": "slow workers: equal GPUs, nobody else on them, and even shares (--batch-size)",
    "compute": "the device itself: --amp, --compile, a larger --batch-size",
}


@dataclass(frozen=True)
class Rung:
    """One number of workers, measured.

    Attributes:
        step_ms: the medians of the repetitions.
        shares: of the time: data, wire, stragglers, compute.
        forecast_ms: what plan says, and error: (forecast - measured) / measured.
    """

    workers: int
    global_batch: int
    step_ms: list[float]
    samples_per_second: float
    speedup: float
    efficiency: float
    shares: dict[str, float]
    forecast_ms: float
    error: float

    @property
    def median(self) -> float:
        return statistics.median(self.step_ms)


@dataclass(frozen=True)
class Bench:
    """What was measured."""

    about: dict[str, Any]
    rungs: list[Rung]
    knob: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def counts(words: str | None) -> list[int]:
    """Numbers of workers: those asked for, or powers of two up to the GPUs, or the cores, of this machine."""
    most = visible_gpus() or min(cores(), 8)
    if words is None:
        return [2**power for power in range(most.bit_length()) if 2**power <= most]
    try:
        found = sorted({int(word) for word in words.split(",")})
    except ValueError as error:
        raise RequestError(f"--workers {words}", remedy="numbers, as 1,2,4") from error
    if found[0] < 1 or (visible_gpus() and found[-1] > visible_gpus()):
        raise RequestError(f"--workers {words}: this machine has {visible_gpus() or cores()} devices to use")
    return sorted({1, *found})


def benched(config: Config, workers: list[int], steps: int, repetitions: int, environ: Mapping[str, str]) -> Bench:
    """Run the trainer, repetition by repetition on each number of workers, then forecast the same and compare.

    Raises:
        WorkersFailed: a run failed.
        RequestError, TrainingError: as a training would.
    """
    found: dict[int, list[dict[str, float]]] = {count: [] for count in workers}
    seen: list[Alone] = []
    with tempfile.TemporaryDirectory(prefix="multigpu-bench-") as name:
        for repetition in range(repetitions):
            seen.append(measured(config, workers))  # among the runs: whatever else is at work here disturbs both alike
            for count in workers:
                folder = Path(name, f"{count}-{repetition}")
                found[count].append(one_run(config, count, steps, folder, environ))
    alone = typical(seen)
    network = Network(measured_wire(max(workers))) if len(workers) > 1 else Network(_NO_WIRE)
    forecasts = {row.workers: row for row in forecast_of(alone, config, workers, network)}
    rungs: list[Rung] = []
    for count in workers:
        batch, forecast = forecasts[count].global_batch, 1e3 * forecasts[count].step
        times = [each["step_ms"] for each in found[count]]
        median = statistics.median(times)
        rate = 1e3 * batch / median
        first = rungs[0].samples_per_second if rungs else rate / count
        shares = {name: statistics.median(each[name] for each in found[count]) for name in _KNOBS}
        error = (forecast - median) / median
        gain = rate / first
        rungs.append(Rung(count, batch, times, rate, gain, gain / count, shares, forecast, error))
    about = {
        "model": alone.learner.settled.model,
        "data": config.data.name,
        "device": alone.learner.plan.device,
        "steps": steps,
        "repetitions": repetitions,
        "wire": network.inside.rests_on,
    }
    return Bench(about, rungs, _knob(rungs[-1]))


def one_run(config: Config, workers: int, steps: int, folder: Path, environ: Mapping[str, str]) -> dict[str, float]:
    """The real trainer for some steps; medians of its journal's windows, the first left out."""
    place = {"multi_gpu": "none"} if workers == 1 else {"multi_gpu": "ddp", "nproc_per_node": workers}
    interval = max(1, ceil(steps / _LINES))
    length = {"epochs": _ENDLESS, "max_steps": interval * _LINES, "log_interval": interval}
    quiet = {"save_dir": str(folder), "resume": "never", "checkpoint_every": str(_ENDLESS), "warmup_epochs": 0.0}
    changed = with_settings(config, place | length | quiet)
    changed = replace(changed, explicit=config.explicit | place.keys() | length.keys() | quiet.keys())
    request = folder.with_suffix(".yaml")
    request.write_text(yaml.safe_dump(explicit_dump(changed)))
    run_alone(["--config", str(request), "--quiet"], environ)
    lines = [line for _, line in sorted(history_of(folder).train.items())][1:]
    found = {name: statistics.median(line.get(name) or 0.0 for line in lines) for name in _FIELDS}
    data, wire, stragglers = found["data_wait_share"], found["comm_share"], found["straggler_share"]
    shares = {"data": data, "wire": wire, "stragglers": stragglers}
    return shares | {"compute": 1 - sum(shares.values()), "step_ms": found["step_ms"]}


_FIELDS = ("step_ms", "data_wait_share", "comm_share", "straggler_share")


def write(found: Bench, folder: Path) -> list[Path]:
    """bench.json and bench.png in a folder.

    Raises:
        RequestError: it can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(valid_json(found.as_dict(), indent=1) + "\n")
        (folder / "bench.png").write_bytes(drawn([asdict(rung) for rung in found.rungs], str(found.about["model"])))
    except OSError as error:
        raise RequestError(f"--out {folder}: {error.strerror or error}", remedy="another --out") from error
    return [folder / "bench.json", folder / "bench.png"]


def show(found: Bench, files: Sequence[Path], *, as_json: bool) -> None:
    """Print the table, the comparison with the forecast, and the knob."""
    print(valid_json(found.as_dict(), indent=2) if as_json else "\n".join(_lines(found, files)))


def _lines(found: Bench, files: Sequence[Path]) -> Iterator[str]:
    about = found.about
    runs = f"{counted(about['repetitions'], 'run')} of {about['steps']} steps"
    yield f"{about['model']} on {about['data']}, {about['device']}: {runs}"
    yield f"wire: {about['wire']}"
    head = f"{'workers':>8}{'step (lowest to highest)':>32}{'samples/s':>12}"
    yield f"{head}{'speedup':>9}{'efficiency':>12}{'forecast':>12}"
    for rung in found.rungs:
        spread = f"{rung.median:.2f} ms ({min(rung.step_ms):.2f} to {max(rung.step_ms):.2f})"
        gain = f"{rung.samples_per_second:>12,.0f}{rung.speedup:>9.2f}{rung.efficiency:>12.0%}"
        yield f"{rung.workers:>8}{spread:>32}{gain}{rung.error:>+12.0%}"
        shares = ", ".join(f"{share:.0%} {name}" for name, share in rung.shares.items())
        yield f"{'':>8}  {shares}"
    yield f"what would help most: {found.knob}"
    yield from (f"written: {file}" for file in files)


def _knob(rung: Rung) -> str:
    waits = {name: share for name, share in rung.shares.items() if name != "compute"}
    worst = max(waits, key=lambda name: waits[name])
    return _KNOBS[worst if waits[worst] > 0.1 else "compute"]
