"""A pass over a dataset with a run's weights, on as many workers as there are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.utils.data import Dataset

from multigpu_cli.checkpoint.export import load_trained_weights
from multigpu_cli.commands.inference.load_run import LoadedRun, load_run
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.config.schema import Config, DeviceConfig
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.unlabeled import wrap_unlabeled
from multigpu_cli.errors import RequestError
from multigpu_cli.launch import run_in_workers
from multigpu_cli.run.build_task import build_task
from multigpu_cli.runtime.device_placement import choose_placement, count_cores, count_visible_gpus
from multigpu_cli.runtime.launch_env import LaunchEnv
from multigpu_cli.runtime.precision import Precision, PrecisionChoice, agree_on_precision
from multigpu_cli.runtime.process_group import process_group
from multigpu_cli.runtime.rank_errors import run_on_all_ranks
from multigpu_cli.runtime.torch_settings import set_threads_per_rank
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.base import Task

Result = TypeVar("Result")


@dataclass(frozen=True)
class InferencePass:
    """What one worker needs for its part of a pass.

    Attributes:
        origin: the file of the weights.
        model: on the worker's device, in evaluation mode.
        batch_size: samples at once, the same on every worker.
        answered: whether the samples have targets.
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
    answered: bool
    names: Sequence[str] | None


def run_distributed(request: InferenceRequest, work: Callable[[InferencePass], Result], judged: bool) -> Result | None:
    """Do `work` on each worker, started here unless a launcher has; its result, but None on ranks above 0.

    Args:
        work: what can be sent to other processes.
        judged: the samples' targets are needed.

    Raises:
        RequestError: the run can't be restored, or has no such split; the same on every rank.
    """
    launch_env = LaunchEnv.current()
    wanted = DeviceConfig(multi_gpu="auto", nproc_per_node=request.workers)
    placement = choose_placement(wanted, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=launch_env)
    if placement.num_processes_to_launch > 1:
        found: Result = run_in_workers(placement, run_distributed, request, work, judged)[0]
        return found
    with process_group(launch_env, placement.devices[0], timeout=600.0, backend=placement.backend) as world:
        set_threads_per_rank(world.local_size, count_cores(), exact=False)
        weights = run_on_all_ranks(world, lambda: load_trained_weights(request.run))
        run = run_on_all_ranks(world, lambda: load_run(weights, request.changes, own_code=request.own_code))
        number = _format(run.config, world)
        part = run_on_all_ranks(
            world, lambda: _prepare_pass(request, str(weights.origin), run, world, number, judged=judged)
        )
        try:
            result = work(part)
        finally:
            part.loader.close()
        return result if world.is_main else None


def _format(config: Config, world: World) -> PrecisionChoice:
    """The same on every worker; fp16 of a run on GPUs is no format for CPUs."""
    amp = "off" if config.precision.amp == "fp16" and world.device.type == "cpu" else config.precision.amp
    return agree_on_precision(amp, world, [world.device])


def _prepare_pass(
    request: InferenceRequest, origin: str, run: LoadedRun, world: World, number: PrecisionChoice, *, judged: bool
) -> InferencePass:
    config, name = run.config, _choose_split(run.source, request.split, judged=judged)
    split: Dataset[Any] = getattr(run.source, name)
    guessing = None if judged or name == "new" else wrap_unlabeled(split, run.source.train)
    changed: dict[str, Any] = {name: guessing} if guessing else {}
    source = replace(run.source, **changed)
    task = build_task(config, source)
    usual = 2 * config.batch.size if isinstance(config.batch.size, int) else 64
    return InferencePass(
        origin=origin,
        split=name,
        world=world,
        model=run.model.to(world.device),
        task=task,
        loader=task.loader(name, config.data, world, config.reproducibility.seed),
        precision=Precision(number.name, world.device),
        batch_size=request.batch_size or usual,
        answered=guessing is None and name != "new",
        names=getattr(split, "names", None),
    )


def _choose_split(source: DataSource, wanted: str | None, *, judged: bool) -> str:
    """The split that was asked for, else the first that there is: new samples, test, validation, training."""
    if judged and source.new is not None:
        raise RequestError("data.args.new: these samples have no targets to compare with", remedy="predict")
    there = [name for name in ("new", "test", "val", "train") if getattr(source, name) is not None]
    if wanted and wanted not in there:
        raise RequestError(f"--split {wanted}: the data has none", remedy=f"--split {' or '.join(there)}")
    return wanted or there[0]
