"""A pass over a dataset with a run's weights, on as many workers as there are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.utils.data import Dataset

from multigpu_cli.checkpoint.export import trained_weights
from multigpu_cli.commands.restored import Restored, restored
from multigpu_cli.commands.run_request import Asked
from multigpu_cli.config.schema import Config, DeviceConfig
from multigpu_cli.data.base import Source
from multigpu_cli.data.unanswered import unanswered
from multigpu_cli.errors import RequestError
from multigpu_cli.launch import run_workers
from multigpu_cli.run.build import build_task
from multigpu_cli.runtime.collectives import together
from multigpu_cli.runtime.determinism import share_threads
from multigpu_cli.runtime.devices import choose, cores, visible_gpus
from multigpu_cli.runtime.precision import Format, Precision, agreed_format
from multigpu_cli.runtime.world import Rendezvous, World, joined
from multigpu_cli.tasks.base import Task

Result = TypeVar("Result")


@dataclass(frozen=True)
class Pass:
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


def shared_out(
    wish: Asked, words: Sequence[str], environ: Mapping[str, str], work: Callable[[Pass], Result], *, judged: bool
) -> Result | None:
    """Do `work` on each worker; its result on rank 0, None on the others and where workers were started for it.

    Args:
        words: the command line of a worker.
        environ: the process environment, for what a launcher has set.
        judged: the samples' targets are needed.

    Raises:
        RequestError: the run can't be restored, or has no such split; the same on every rank.
    """
    meeting = Rendezvous.from_environment(environ)
    wanted = DeviceConfig(multi_gpu="auto", nproc_per_node=wish.workers)
    choice = choose(wanted, gpus=visible_gpus(), cpus=cores(), meeting=meeting)
    if choice.launch > 1:
        run_workers(choice, words)
        return None
    with joined(meeting, choice.devices[0], timeout=600.0, backend=choice.backend) as world:
        share_threads(world.local_size, cores(), exact=False)
        found = together(world, lambda: trained_weights(wish.run))
        run = together(world, lambda: restored(found, wish.changes, own_code=wish.own_code))
        number = _format(run.config, world)
        part = together(world, lambda: _prepared(wish, str(found.origin), run, world, number, judged=judged))
        try:
            result = work(part)
        finally:
            part.loader.close()
        return result if world.main else None


def _format(config: Config, world: World) -> Format:
    """The same on every worker; fp16 of a run on GPUs is no format for CPUs."""
    amp = "off" if config.precision.amp == "fp16" and world.device.type == "cpu" else config.precision.amp
    return agreed_format(amp, world, [world.device])


def _prepared(wish: Asked, origin: str, run: Restored, world: World, number: Format, *, judged: bool) -> Pass:
    config, name = run.config, _chosen(run.source, wish.split, judged=judged)
    split: Dataset[Any] = getattr(run.source, name)
    guessing = None if judged or name == "new" else unanswered(split, run.source.train)
    changed: dict[str, Any] = {name: guessing} if guessing else {}
    source = replace(run.source, **changed)
    task = build_task(config, source)
    usual = 2 * config.batch.size if isinstance(config.batch.size, int) else 64
    return Pass(
        origin=origin,
        split=name,
        world=world,
        model=run.model.to(world.device),
        task=task,
        loader=task.loader(name, config.data, world, config.reproducibility.seed),
        precision=Precision(number.name, world.device),
        batch_size=wish.batch_size or usual,
        answered=guessing is None and name != "new",
        names=getattr(split, "names", None),
    )


def _chosen(source: Source, wanted: str | None, *, judged: bool) -> str:
    """The split that was asked for, else the first that there is: new samples, test, validation, training."""
    if judged and source.new is not None:
        raise RequestError("data.args.new: these samples have no targets to compare with", remedy="predict")
    there = [name for name in ("new", "test", "val", "train") if getattr(source, name) is not None]
    if wanted and wanted not in there:
        raise RequestError(f"--split {wanted}: the data has none", remedy=f"--split {' or '.join(there)}")
    return wanted or there[0]
