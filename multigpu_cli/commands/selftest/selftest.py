"""selftest: whether the promises hold for the user's own model, data and settings, on one worker and on several."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.pieces import deserialize, serialize
from multigpu_cli.commands.requests import parse_option
from multigpu_cli.commands.selftest.checks import CheckResult, Measurements, run_checks
from multigpu_cli.commands.selftest.measure import measure_all
from multigpu_cli.commands.selftest.process import Measured, SelftestProcess, first_batch
from multigpu_cli.config import rules
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import SETTINGS, Config, DeviceConfig
from multigpu_cli.config.types import integer
from multigpu_cli.data.collate import TokenCounts
from multigpu_cli.data.load import check_has_samples, open_data
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.placement import Placement, choose_placement, count_cores, count_visible_gpus
from multigpu_cli.distributed.process_group import join_workers
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import WRONG_REQUEST, RequestError
from multigpu_cli.launch import WorkersFailed, run_in_workers
from multigpu_cli.planning.batch import plan_batches
from multigpu_cli.runtime.precision import agree_on_precision

_WORKERS = 2
_LONGEST_WAIT = 120.0  # seconds in a collective; a test is not worth ten minutes
_OF_A_LAUNCH = {"multi_gpu", "gpu_ids", "nproc_per_node", "shard_size", "max_restarts", "grad_accum_steps", "max_steps"}


@dataclass(frozen=True)
class Report:
    """The result of all checks, and what was tested, where and how."""

    about: dict[str, Any]
    verdicts: list[CheckResult]

    @property
    def holds(self) -> bool:
        return all(verdict.holds is not False for verdict in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        return self.about | {"holds": self.holds, "verdicts": [verdict._asdict() for verdict in self.verdicts]}


Launcher = Callable[[Config, Placement, Path], None]
"""Starts the workers of a placement, has each call `measure_as_worker`, and waits for them."""


def start_workers(config: Config, placement: Placement, folder: Path) -> None:
    """Run the workers by torch's elastic agent; WorkersFailed: one of them failed."""
    run_in_workers(placement, _run_worker, config, folder)


def run_selftest(config: Config, steps: str, start: Launcher = start_workers) -> Report:
    """Measure one worker, then several, and compare; only a temporary folder is written."""
    length, placement = parse_option(integer(2, 1000), "--steps", steps), _choose_devices(config)
    workers, device = placement.num_processes_to_launch, placement.devices[0]
    precision = agree_on_precision(config.precision.amp, World(device), placement.devices).name
    config = replace(replace_settings(config, {"amp": precision}), explicit=config.explicit | {"amp"})
    source, fixed = prepare_run(config, workers, length)
    faults = rules.find_rule_errors(replace_settings(fixed, {"exact": True}))
    no_exact = faults[0].problem if faults else ""
    with tempfile.TemporaryDirectory(prefix="multigpu-selftest-") as name:
        folder = Path(name)
        single = Placement("single", (device,), 0, "selftest")
        process = _make_process(fixed, source, single, World(device), workers, length, folder)
        process = replace(process, exact=not no_exact, batch=(batch := first_batch(process)))
        alone = measure_all(process, lambda measured: None)
        several = _measure_workers(fixed, placement, length, folder, batch, alone, start)
    about = {
        "model": config.model.name or source.model,
        "data": config.data.name,
        "task": config.task.name or source.task,
        "workers": workers,
        "device": device.type,
        "precision": precision,
        "steps": length,
        "batch_size": config.batch.size,
        "global_batch_size": fixed.batch.global_size,
    }
    return Report(about, run_checks(Measurements(alone, several, config, no_exact)))


def _run_worker(config: Config, folder: Path) -> None:
    with join_workers(DeviceConfig(), min(config.fault.hang_timeout, _LONGEST_WAIT)) as (placement, world):
        measure_as_worker(config, folder, placement, world)


def measure_as_worker(config: Config, folder: Path, placement: Placement, world: World) -> None:
    """Measure as one of several workers, and write the results into the folder."""
    task = json.loads((folder / "task.json").read_text())
    read = deserialize((folder / "batch.pt").read_bytes(), "batch.pt")
    batch = Batch(**read | {"tokens": read["tokens"] and TokenCounts(*read["tokens"])})
    source, fixed = prepare_run(config, world.size, task["steps"])
    process = _make_process(fixed, source, placement, world, world.size, task["steps"], folder)
    file = folder / f"rank_{world.rank}.pt"
    measure_all(replace(process, exact=task["exact"], batch=batch), lambda measured: publish(file, serialize(measured)))


def format_report(report: Report) -> Iterator[str]:
    """What was tested, and a table of the verdicts."""
    yield (
        "{model} on {data}, {task}: 1 and {workers} workers on {device}, amp {precision}, {steps} steps of "
        "{global_batch_size} samples in micro-batches of {batch_size}"
    ).format(**report.about)
    widest = max(len(verdict.check) for verdict in report.verdicts)
    for check, holds, figures, remedy in report.verdicts:
        yield f" {({True: 'ok', False: 'FAIL', None: '-'})[holds]:<5} {check:<{widest}}  {figures}"
        if remedy and holds is False:
            yield f"       {'':<{widest}}  try: {remedy}"
    wrong = sum(verdict.holds is False for verdict in report.verdicts)
    yield "all hold" if report.holds else f"{wrong} of {len(report.verdicts)} do not hold"


def prepare_run(config: Config, workers: int, steps: int) -> tuple[DataSource, Config]:
    """A part of the data whose epochs end in a short batch, and the settings with the global batch fixed."""
    check_has_samples(config, "selftest")
    if config.batch.size == "auto":
        raise RequestError("selftest does not accept --batch-size auto", remedy="a number: --batch-size 32")
    micro_batch = int(config.batch.size)
    whole = config.batch.global_size or micro_batch * (config.batch.grad_accum_steps or 1) * workers
    source = shorten_source(open_data(config), micro_batch, whole, workers)
    size = len(source.train)  # type: ignore[arg-type]
    drop = config.batch.drop_last
    batches = plan_batches(samples=size, micro_batch=micro_batch, workers=workers, global_batch=whole, drop_last=drop)
    epochs = max(config.length.epochs, -(-steps // batches.steps_per_epoch))
    own = {"global_batch_size": whole, "epochs": epochs, "resume": "never"}
    defaults = {name: SETTINGS[name].default for name in _OF_A_LAUNCH}
    fixed = replace_settings(config, defaults | own | {"trace_samples": False, "mirror": None, "logger": []})
    return source, replace(fixed, explicit=(config.explicit - _OF_A_LAUNCH | own.keys()) - {"save_dir"})


def shorten_source(source: DataSource, micro_batch: int, global_batch: int, workers: int) -> DataSource:
    """Two full batches and a short one to train on, a few batches to evaluate."""
    half_of_them = -(-global_batch // micro_batch) // 2 * micro_batch
    short = min(half_of_them + max(2, micro_batch // 2), max(1, global_batch - 1))
    size = min(len(source.train), 2 * global_batch + short)  # type: ignore[arg-type]
    if size % global_batch == 0:
        size -= max(1, micro_batch // 2)
    held_out = source.val or source.test or source.train
    return replace(
        source,
        train=_take_first(source.train, size),
        order=None,  # of all samples
        order_has_repeats=False,
        val=_take_first(held_out, 4 * micro_batch * (workers + 1) + micro_batch),
        test=None,
    )


def _take_first(split: Dataset[Any], count: int) -> Dataset[Any]:
    if isinstance(split, TensorDataset):
        return TensorDataset(*(tensor[:count] for tensor in split.tensors))
    return Subset(split, range(min(count, len(split))))  # type: ignore[arg-type]


def _choose_devices(config: Config) -> Placement:
    """Several GPUs where there are enough, else the CPU."""
    if config.model.sync_bn:
        problem = "selftest can't test --sync-bn: by design, a micro-batch's result then depends on the other workers'"
        raise RequestError(problem, remedy="selftest without --sync-bn")
    if config.device.multi_gpu == "dp":
        raise RequestError("selftest compares ddp with one worker, not --multi-gpu dp", remedy="leave out --multi-gpu")
    workers, ids, gpus = config.device.nproc_per_node or _WORKERS, config.device.gpu_ids, count_visible_gpus()
    if workers < 2:
        raise RequestError("--nproc-per-node 1 leaves nothing to compare", remedy="--nproc-per-node 2 or more")
    wanted = DeviceConfig(multi_gpu="ddp", gpu_ids=ids, nproc_per_node=workers)
    return choose_placement(wanted, gpus=gpus if ids or gpus >= workers else 0, cpus=count_cores(), launch_env=None)


def _make_process(
    config: Config, source: DataSource, placement: Placement, world: World, workers: int, steps: int, folder: Path
) -> SelftestProcess:
    home = folder / f"{world.size}-workers"
    home.mkdir(exist_ok=True)
    config = replace(config, checkpoint=replace(config.checkpoint, save_dir=str(home)))
    return SelftestProcess(config=config, placement=placement, world=world, source=source, workers=workers, steps=steps)


def _measure_workers(
    config: Config, placement: Placement, steps: int, folder: Path, batch: Batch, alone: Measured, start: Launcher
) -> list[Measured]:
    """What the workers measured; parameters without gradient are allowed there: the single worker reports them."""
    if any(alone["reference"][which]["missing"] for which in ("first", "last")):
        config = replace_settings(config, {"find_unused_parameters": True})
        config = replace(config, explicit=config.explicit | {"find_unused_parameters"})
    exact = bool(alone["exact"]) and "refused" not in alone["exact"]
    (folder / "task.json").write_text(json.dumps({"steps": steps, "exact": exact}))
    publish(folder / "batch.pt", serialize(vars(batch) | {"tokens": batch.tokens and tuple(batch.tokens)}))
    try:
        start(config, placement, folder)
    except WorkersFailed as failure:
        if failure.exit_code == WRONG_REQUEST:
            raise
        print(f"error: {failure}", file=sys.stderr)
    files = [folder / f"rank_{rank}.pt" for rank in range(placement.num_processes_to_launch)]
    return [dict(deserialize(file.read_bytes(), file.name)) if file.exists() else {} for file in files]
