"""A pass over a dataset with a run's weights, on any number of workers."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.utils.data import Dataset

from multigpu_cli.checkpoint.trained_weights import load_trained_weights
from multigpu_cli.commands.inference.load_run import LoadedRun, load_run
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.commands.workers import join_workers, place_on_machine
from multigpu_cli.config.own_code import NAMING
from multigpu_cli.config.schema import Config, DeviceConfig
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.wrap_unlabeled import wrap_unlabeled
from multigpu_cli.errors import RequestError
from multigpu_cli.launch import run_in_workers
from multigpu_cli.run.build_task import build_task
from multigpu_cli.runtime.choose_strategy_and_devices import count_cores
from multigpu_cli.runtime.launch_env import LaunchEnv, refuse_srun_copies
from multigpu_cli.runtime.precision import Precision, PrecisionChoice, agree_on_precision
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks
from multigpu_cli.runtime.torch_settings import set_threads_per_rank
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.base import Task
from multigpu_cli.tasks.metrics.load import load_metrics

Result = TypeVar("Result")


@dataclass(frozen=True)
class InferencePass:
    """One worker's part of a pass.

    Attributes:
        origin: the file of the weights.
        model: on the worker's device, in evaluation mode.
        batch_size: samples at once, the same on every worker.
        has_targets: the samples have targets.
        names: of the samples, where they have some.
    """

    origin: str
    split: str
    world: World
    model: nn.Module
    task: Task
    loader: Any
    precision: Precision
    batch_size: int
    has_targets: bool
    names: Sequence[str] | None


def run_distributed(
    request: InferenceRequest, work: Callable[[InferencePass], Result], needs_targets: bool
) -> Result | None:
    """Call `work` on each worker, started here unless a launcher has; its result, but None on ranks above 0.

    Args:
        work: a function that can be sent to other processes.
        needs_targets: it compares with the samples' targets.

    Raises:
        RequestError: the run can't be loaded, or has no such split; the same on every rank.
    """
    wanted = DeviceConfig(multi_gpu="auto", nproc_per_node=request.workers)
    refuse_srun_copies()
    placement = place_on_machine(wanted, LaunchEnv.current())
    if placement.num_processes_to_launch > 1:
        result: Result = run_in_workers(placement, run_distributed, request, work, needs_targets)[0]
        return result
    with join_workers(wanted, 600.0) as (_, world):
        set_threads_per_rank(world.local_size, count_cores(), exact=False)
        weights = run_on_all_ranks(world, lambda: load_trained_weights(request.run))
        run = run_on_all_ranks(
            world,
            lambda: load_run(
                weights,
                request.changes,
                own_code=request.own_code,
                checks_base=world.is_main,
                parts=(*NAMING, "metric") if needs_targets else NAMING,
            ),
        )
        precision = _choose_precision(run.config, world)
        part = run_on_all_ranks(
            world, lambda: _prepare_pass(request, str(weights.origin), run, world, precision, needs_targets)
        )
        with closing(part.loader):
            result = work(part)
        return result if world.is_main else None


def _choose_precision(config: Config, world: World) -> PrecisionChoice:
    """The same on every worker; CPUs do not take the fp16 of a run on GPUs."""
    amp = "off" if config.precision.amp == "fp16" and world.device.type == "cpu" else config.precision.amp
    return agree_on_precision(amp, world, [world.device])


def _prepare_pass(
    request: InferenceRequest,
    origin: str,
    run: LoadedRun,
    world: World,
    precision: PrecisionChoice,
    needs_targets: bool,
) -> InferencePass:
    config, name = run.config, _choose_split(run.source, request.split, needs_targets=needs_targets)
    split: Dataset[Any] = getattr(run.source, name)
    unlabeled = None if needs_targets or name == "new" else wrap_unlabeled(split, run.source.train, run.source.form)
    changed: dict[str, Any] = {name: unlabeled} if unlabeled else {}
    source = replace(run.source, **changed)
    task = build_task(config, source)
    if needs_targets:
        task.own_metrics = load_metrics(config.metric, source, config.task.name or source.task)
    usual = 2 * config.batch.size if isinstance(config.batch.size, int) else 64
    model, number_format = run.model.to(world.device), Precision(precision.name, world.device)
    if type(task).evaluate is Task.evaluate:  # PPO's check begins to play
        task.check_model(model, number_format)
    return InferencePass(
        origin=origin,
        split=name,
        world=world,
        model=model,
        task=task,
        loader=task.loader(name, config.data, world, config.reproducibility.seed),
        precision=number_format,
        batch_size=request.batch_size or usual,
        has_targets=unlabeled is None and name != "new",
        names=getattr(split, "names", None),
    )


def _choose_split(source: DataSource, wanted: str | None, *, needs_targets: bool) -> str:
    """The requested split, or else the first that exists: new samples, test, validation, training."""
    if needs_targets and source.new is not None:
        raise RequestError("data.args.new: these samples have no targets to compare with", remedy="predict")
    splits = [name for name in ("new", "test", "val", "train") if getattr(source, name) is not None]
    if wanted and wanted not in splits:
        raise RequestError(f"--split {wanted}: the data has no such split", remedy=f"--split {' or '.join(splits)}")
    return wanted or splits[0]
