"""What learns, and from what: model, optimizer, task, strategy and data, before any file of the run is touched."""

import shutil
import traceback
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from multigpu_cli.checkpoint.manifest import read_manifest
from multigpu_cli.checkpoint.snapshot import Kept, Progress
from multigpu_cli.checkpoint.store import Checkpoint
from multigpu_cli.checkpoint.weights import check_extra_state, warm_start
from multigpu_cli.config.kinds import shown
from multigpu_cli.config.pinned import with_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.data.base import Source
from multigpu_cli.data.feed import Feed
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.sample import shapes
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import adapted, build_model, in_channels_last, prepared
from multigpu_cli.optimizers import averaged, build_optimizer, set_rate
from multigpu_cli.planning.plan import Plan
from multigpu_cli.run.settle import Settled
from multigpu_cli.runtime import plugins
from multigpu_cli.runtime.collectives import decided, together
from multigpu_cli.runtime.compiled import Compiled
from multigpu_cli.runtime.determinism import seed_weights
from multigpu_cli.runtime.memory import is_out_of_memory
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.preserve import evaluating, preserve_buffers
from multigpu_cli.runtime.world import World
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.strategies.single import Single
from multigpu_cli.tasks.base import Task
from multigpu_cli.tasks.registry import TASKS
from multigpu_cli.tasks.units import Units

if TYPE_CHECKING:
    from multigpu_cli.run.brought import Brought


@dataclass
class Loaders:
    """The data of each split.

    Attributes:
        eval_limit: samples in one batch of an evaluation at most, where memory has set a limit.
    """

    train: Feed
    val: Loader | None
    test: Loader | None
    eval_limit: int | None = None

    def close(self) -> None:
        """End the loader processes, if there are any."""
        for loader in (self.train, self.val, self.test):
            if loader is not None:
                loader.close()


@dataclass
class Learner:
    """The parts that a step and an evaluation need."""

    settled: Settled
    world: World
    task: Task
    kept: Kept
    strategy: Strategy
    loaders: Loaders
    units: Units
    compiled: Compiled | None = field(default=None, kw_only=True)

    @cached_property
    def trained(self) -> list[Tensor]:
        """The parameters that the optimizer moves."""
        return [p for p in self.kept.model.parameters() if p.requires_grad]

    @property
    def config(self) -> Config:
        return self.settled.config

    @property
    def plan(self) -> Plan:
        return self.settled.plan

    @property
    def progress(self) -> Progress:
        return self.kept.progress

    def set_rates(self, step: int) -> None:
        """The rate of optimizer step `step`: the schedule's, or where the user's own optimizer and scheduler are."""
        live = self.settled.brought
        if live and live.optimizer:
            live.follow(self.kept, step, self.plan.batches.steps_per_epoch)
        else:
            set_rate(self.kept.optimizer, self.plan.schedule.at(step))

    @property
    def eval_batch(self) -> int:
        """Samples in one batch of an evaluation: the same on any number of workers; it keeps no activations."""
        usual = 2 * self.plan.batches.micro_batch
        return min(usual, self.loaders.eval_limit or usual)


def build_learner(settled: Settled, world: World) -> Learner:
    """Build everything that learns, on this rank's device, and bring it to where its checkpoint says.

    Raises:
        RequestError: the model, the task, the weights or the first batch do not fit; the same on every rank.
    """
    task = together(world, lambda: task_of(settled.config, settled.source, settled.brought))
    loaders = together(world, lambda: _loaders(settled, world, task))
    kept = together(world, lambda: _on_this_rank(settled, world, task, loaders.train))
    if settled.brought:
        from multigpu_cli.run.brought import make_alike

        make_alike(kept.model, world)
        if kept.average:
            kept.average.module.load_state_dict(kept.model.state_dict())
    _restore(kept, task, settled, world)
    model = together(world, lambda: _compiled(kept.model, settled.config, world.device))
    settled = _with_buckets(settled, kept.model, world)
    learner = Learner(settled, world, task, kept, _strategy(model, world, settled), loaders, Units(task, world))
    if isinstance(model, Compiled):
        learner.compiled, model.size = model, lambda: learner.plan.batches.micro_batch
    return learner


def _on_this_rank(settled: Settled, world: World, task: Task, train: Feed) -> Kept:
    """What can be built without communication, so that errors can be compared."""
    config, source = settled.config, settled.source
    live = settled.brought
    model = prepared(adapted(live.model), config.model, settled.model) if live else fresh_model(config, source)
    if config.model.init_from and not settled.start.checkpoint:
        warm_start(model, Path(config.model.init_from))
    model.to(world.device).train()
    precision = Precision(settled.plan.precision, world.device)
    task.begin(model, precision)
    _lay_out(settled, task, model, precision, first_batch(train, min(2, train.size)))
    check_extra_state(model, settled.model)
    ema = config.optimizer.ema
    average = None if ema == "off" else averaged(model, float(ema))
    optimizer = (live and live.ready_optimizer(model)) or build_optimizer(model, config.optimizer)
    scheduler = live.scheduler if live else None
    return Kept(model, optimizer, precision, average, Progress(), scheduler)


def fresh_model(config: Config, source: Source) -> nn.Module:
    """The network as its seed makes it, the dataset's own where the user named none."""
    offered = {
        "input_shape": source.input_shape,
        "num_classes": source.num_classes or source.outputs,
        "task": config.task.name or source.task,
        "mode": config.data.mode,
        "seed": config.reproducibility.seed,
    } | dict(source.offers)
    seed_weights(config.reproducibility.seed)
    return build_model(config.model, config.model.name or source.model, offered)


def _lay_out(settled: Settled, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> None:
    """Channels last where the model has 2-d convolutions and takes a batch like that; a `.view` of features may not."""
    if any(map(is_lazy, model.parameters())):  # their weights come with the first pass, and until then have no layout
        seed_weights(settled.config.reproducibility.seed, late=True)
        _try_a_batch(settled, task, model, precision, batch)
    if in_channels_last(model):
        try:
            return _try_a_batch(settled, task, model, precision, batch)
        except RequestError:
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return _try_a_batch(settled, task, model, precision, batch)


def _try_a_batch(settled: Settled, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> None:
    """Whether data, model and task fit together shows in one small evaluation, before anything is written."""
    seen: list[str] = []
    watch = model.register_forward_hook(lambda _module, _inputs, output: seen.append(shapes(output)))
    try:
        with preserve_buffers(model), evaluating(model), precision.autocast():
            task.measure(model, batch)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        if is_out_of_memory(error):
            raise
        raise _no_fit(settled, task, batch, seen, error) from error
    finally:
        watch.remove()


def _no_fit(settled: Settled, task: Task, batch: Batch, outputs: list[str], error: Exception) -> RequestError:
    """What was called with what, and what was expected."""
    source, config = settled.source, settled.config
    line = traceback.extract_tb(error.__traceback__)[-1]
    said = (str(error).splitlines() or [""])[0]
    classes = source.num_classes or source.outputs
    args = "".join(f", {name}={shown(value)}" for name, value in config.model.args.items())
    built = f"  the model was built for input_shape={source.input_shape}, num_classes={classes}{args}"
    told = [
        f"--model {settled.model} does not take the first batch of --data {config.data.name}, or --task {settled.task} "
        "not what it returns",
        f"  {type(error).__name__} in {Path(line.filename).name}:{line.lineno}: {said}",
        *([] if settled.brought else [built]),
        f"  it was called with  {shapes(batch.inputs)}",
        f"  it returned         {outputs[0] if outputs else 'nothing: it failed itself'}",
        f"  the targets are     {shapes(batch.targets)}",
        f"  the task expects    {task.expects}",
    ]
    remedy = "another --model, or --task" if outputs else "a model for these inputs"
    whole = "" if settled.brought else "; --debug shows the whole way to where it failed"
    return RequestError("\n".join(told), remedy=remedy + whole)


def _loaders(settled: Settled, world: World, task: Task) -> Loaders:
    source, data, seed = settled.source, settled.config.data, settled.config.reproducibility.seed
    held_out = {"val": source.val, "test": source.test}
    val, test = (None if part is None else task.loader(name, data, world, seed) for name, part in held_out.items())
    return Loaders(task.feed(data, world, seed), val, test)


def first_batch(loader: Feed, size: int) -> Batch:
    """The first samples, unshuffled: alike on every rank, and at every start."""
    return next(loader.held_out(size, 0, 1))


def task_of(config: Config, source: Source, live: "Brought | None") -> Task:
    """The user's own loss as a task, or the one that has a name."""
    if not (live and live.criterion):
        return build_task(config, source)
    from multigpu_cli.tasks.criterion import Criterion  # late: most losses have a name

    return Criterion(source, config.task, live.criterion)


def build_task(config: Config, source: Source) -> Task:
    """The task that the user named, else the dataset's own."""
    name = config.task.name or source.task
    found = plugins.find(name, TASKS, flag="--task")
    task = plugins.call(found, {"source": source, "config": config.task}, config.task.args, where="task")
    if not isinstance(task, Task):
        raise RequestError(f"--task {name}: not a subclass of multigpu_cli.tasks.base.Task")
    return task


def _restore(kept: Kept, task: Task, settled: Settled, world: World) -> None:
    """One rank reads the checkpoint; the others get it from there, so only one machine needs the file."""
    if not settled.start.checkpoint:
        return
    path = Path(settled.start.checkpoint)
    state: dict[str, Any] = decided(
        world, lambda: Checkpoint(path, read_manifest(path)).state(), by=settled.start.holder
    )
    kept.restore(state, settled.start.checkpoint)
    if not settled.same_length:  # more epochs are a new chance for a run that had stopped early
        kept.progress.stopped_early, kept.progress.stale_epochs = False, 0
    if state.get("task"):
        kept.restore_warning = task.load_state(state["task"], world)


def _with_buckets(settled: Settled, model: nn.Module, world: World) -> Settled:
    """--bucket-cap-mb auto, measured; a checkpoint pins it, since with several workers it decides who adds up what."""
    config = settled.config
    if config.communication.bucket_cap_mb != "auto" or world.size == 1 or config.reproducibility.exact:
        return settled
    from multigpu_cli.strategies.buckets import measured_cap

    return replace(settled, config=with_settings(config, {"bucket_cap_mb": measured_cap(model, world)}))


def _strategy(model: nn.Module, world: World, settled: Settled) -> Strategy:
    config, choice, live = settled.config, settled.choice, settled.brought
    if config.reproducibility.exact:
        from multigpu_cli.strategies.exact import Exact  # late, each of them: a run has one

        return Exact(model, world)
    if choice.strategy == "dp":
        from multigpu_cli.strategies.data_parallel import DataParallel

        return DataParallel(model, choice.devices)
    if choice.strategy == "ddp":
        from multigpu_cli.strategies.distributed import Distributed

        return Distributed(model, world, config.communication, live.ddp if live else {})
    return Single(model)


_COMPILERS = {  # of what torch generates; on CUDA Triton builds what launches its kernels, in C
    "cpu": ("C++", ("g++", "c++", "clang++")),
    "cuda": ("C", ("gcc", "clang")),
}


def _compiled(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    wanted = config.model.compile
    if wanted == "off":
        return model
    language, names = _COMPILERS[device.type]
    if not any(map(shutil.which, names)):
        raise RequestError(
            f"--compile {wanted} on {device.type.upper()} needs a {language} compiler, and there is none",
            remedy=f"--compile off, or install {names[0]}",
        )
    if device.type == "cuda" and wanted == "reduce-overhead" and config.reproducibility.exact:
        raise RequestError(
            "--compile reduce-overhead: CUDA graphs write over the gradients that --exact still has to add up",
            remedy="--compile default, or no --exact",
        )
    return Compiled(model, None if wanted == "default" else wanted)
