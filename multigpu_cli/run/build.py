"""Builds model, optimizer, task, strategy and loaders, before any file of the run is touched."""

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
from multigpu_cli.checkpoint.snapshot import Progress, TrainState
from multigpu_cli.checkpoint.store import Checkpoint
from multigpu_cli.checkpoint.weights import check_extra_state, warm_start
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.config.types import quote_value
from multigpu_cli.data.batch_stream_protocol import BatchStream
from multigpu_cli.data.collate import describe_shapes
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import adapt_model, build_model, prepare_model, use_channels_last
from multigpu_cli.optimizers import build_ema, build_optimizer, set_rate
from multigpu_cli.planning.plan import Plan
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.runtime import factories
from multigpu_cli.runtime.compile import CompiledModel
from multigpu_cli.runtime.out_of_memory import is_out_of_memory
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.preserve_module_state import eval_mode, preserve_buffers
from multigpu_cli.runtime.rank_errors import run_on_all_ranks, run_on_main_rank
from multigpu_cli.runtime.seeding import seed_weights
from multigpu_cli.runtime.world import World
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.strategies.single import Single
from multigpu_cli.tasks.base import Task
from multigpu_cli.tasks.loss_units import LossNormalizer
from multigpu_cli.tasks.registry import TASKS

if TYPE_CHECKING:
    from multigpu_cli.run.user_objects import UserObjects


@dataclass
class Loaders:
    """The data of each split.

    Attributes:
        max_eval_batch: samples in one batch of an evaluation at most, where memory has set a limit.
    """

    train: BatchStream
    val: Loader | None
    test: Loader | None
    max_eval_batch: int | None = None

    def close(self) -> None:
        """End the loader processes, if there are any."""
        for loader in (self.train, self.val, self.test):
            if loader is not None:
                loader.close()


@dataclass
class TrainComponents:
    """The parts that a step and an evaluation need."""

    spec: RunSpec
    world: World
    task: Task
    state: TrainState
    strategy: Strategy
    loaders: Loaders
    loss_normalizer: LossNormalizer
    compiled: CompiledModel | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.compiled:
            self.compiled.full_batch_size = lambda: (
                self.plan.batches.micro_batch
            )  # whoever trains may halve it on the way

    @cached_property
    def trainable_parameters(self) -> list[Tensor]:
        """The parameters that the optimizer moves."""
        return [p for p in self.state.model.parameters() if p.requires_grad]

    @property
    def config(self) -> Config:
        return self.spec.config

    @property
    def plan(self) -> Plan:
        return self.spec.plan

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def set_learning_rates(self, step: int) -> None:
        """The rate of optimizer step `step`: the schedule's, or where the user's own optimizer and scheduler are."""
        live = self.spec.user_objects
        if live and live.optimizer:
            live.step_scheduler(self.state, step, self.plan.batches.steps_per_epoch)
        else:
            set_rate(self.state.optimizer, self.plan.schedule.rate_at(step))

    @property
    def eval_batch(self) -> int:
        """Samples in one batch of an evaluation: the same on any number of workers; it keeps no activations."""
        usual = 2 * self.plan.batches.micro_batch
        return min(usual, self.loaders.max_eval_batch or usual)


def build_components(spec: RunSpec, world: World) -> TrainComponents:
    """Build everything that learns, on this rank's device, and bring it to where its checkpoint says.

    Raises:
        RequestError: the model, the task, the weights or the first batch do not fit; the same on every rank.
    """
    task = run_on_all_ranks(world, lambda: choose_task(spec.config, spec.source, spec.user_objects))
    loaders = run_on_all_ranks(world, lambda: _build_loaders(spec, world, task))
    state = run_on_all_ranks(world, lambda: _build_state(spec, world, task, loaders.train))
    if spec.user_objects:
        from multigpu_cli.run.user_objects import broadcast_weights

        broadcast_weights(state.model, world)
        if state.average:
            state.average.module.load_state_dict(state.model.state_dict())
    _restore_checkpoint(state, task, spec, world)
    model = run_on_all_ranks(world, lambda: _compile_model(state.model, spec.config, world.device))
    spec = _measure_buckets(spec, state.model, world)
    strategy, units = _build_strategy(model, world, spec), LossNormalizer(task, world)
    compiled = model if isinstance(model, CompiledModel) else None
    return TrainComponents(spec, world, task, state, strategy, loaders, units, compiled=compiled)


def _build_state(spec: RunSpec, world: World, task: Task, train: BatchStream) -> TrainState:
    """What can be built without communication, so that errors can be compared."""
    config, source = spec.config, spec.source
    live = spec.user_objects
    model = prepare_model(adapt_model(live.model), config.model, spec.model) if live else init_model(config, source)
    if config.model.init_from and not spec.start.checkpoint:
        warm_start(model, Path(config.model.init_from))
    model.to(world.device).train()
    precision = Precision(spec.plan.precision, world.device)
    task.check_model(model, precision)
    _choose_memory_format(spec, task, model, precision, first_batch(train, min(2, train.size)))
    check_extra_state(model, spec.model)
    ema = config.optimizer.ema
    average = None if ema == "off" else build_ema(model, float(ema))
    optimizer = (live and live.prepare_optimizer(model)) or build_optimizer(model, config.optimizer)
    scheduler = live.scheduler if live else None
    return TrainState(model, optimizer, precision, average, Progress(), scheduler)


def init_model(config: Config, source: DataSource) -> nn.Module:
    """The network as its seed makes it, the dataset's own where the user named none."""
    offered = {
        "input_shape": source.input_shape,
        "num_classes": source.num_classes or source.num_outputs,
        "task": config.task.name or source.task,
        "mode": config.data.mode,
        "seed": config.reproducibility.seed,
    } | dict(source.model_kwargs)
    seed_weights(config.reproducibility.seed)
    return build_model(config.model, config.model.name or source.model, offered)


def _choose_memory_format(spec: RunSpec, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> None:
    """Channels last where the model has 2-d convolutions and takes a batch like that; a `.view` of features may not."""
    if any(map(is_lazy, model.parameters())):  # their weights come with the first pass, and until then have no layout
        seed_weights(spec.config.reproducibility.seed, late=True)
        _smoke_test_batch(spec, task, model, precision, batch)
    if use_channels_last(model):
        try:
            return _smoke_test_batch(spec, task, model, precision, batch)
        except RequestError:
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return _smoke_test_batch(spec, task, model, precision, batch)


def _smoke_test_batch(spec: RunSpec, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> None:
    """Whether data, model and task fit together shows in one small evaluation, before anything is written."""
    seen: list[str] = []
    hook = model.register_forward_hook(lambda _module, _inputs, output: seen.append(describe_shapes(output)))
    try:
        with preserve_buffers(model), eval_mode(model), precision.autocast():
            task.measure(model, batch)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        if is_out_of_memory(error):
            raise
        raise _mismatch_error(spec, task, batch, seen, error) from error
    finally:
        hook.remove()


def _mismatch_error(spec: RunSpec, task: Task, batch: Batch, outputs: list[str], error: Exception) -> RequestError:
    """What was called with what, and what was expected."""
    source, config = spec.source, spec.config
    line = traceback.extract_tb(error.__traceback__)[-1]
    said = (str(error).splitlines() or [""])[0]
    classes = source.num_classes or source.num_outputs
    args = "".join(f", {name}={quote_value(value)}" for name, value in config.model.args.items())
    built = f"  the model was built for input_shape={source.input_shape}, num_classes={classes}{args}"
    lines = [
        f"--model {spec.model} does not take the first batch of --data {config.data.name}, or --task {spec.task} "
        "not what it returns",
        f"  {type(error).__name__} in {Path(line.filename).name}:{line.lineno}: {said}",
        *([] if spec.user_objects else [built]),
        f"  it was called with  {describe_shapes(batch.inputs)}",
        f"  it returned         {outputs[0] if outputs else 'nothing: it failed itself'}",
        f"  the targets are     {describe_shapes(batch.targets)}",
        f"  the task expects    {task.expected_shapes}",
    ]
    remedy = "another --model, or --task" if outputs else "a model for these inputs"
    whole = "" if spec.user_objects else "; --debug shows the whole way to where it failed"
    return RequestError("\n".join(lines), remedy=remedy + whole)


def _build_loaders(spec: RunSpec, world: World, task: Task) -> Loaders:
    source, data, seed = spec.source, spec.config.data, spec.config.reproducibility.seed
    held_out = {"val": source.val, "test": source.test}
    val, test = (None if part is None else task.loader(name, data, world, seed) for name, part in held_out.items())
    return Loaders(task.train_stream(data, world, seed), val, test)


def first_batch(loader: BatchStream, size: int) -> Batch:
    """The first samples, unshuffled: alike on every rank, and at every start."""
    return next(loader.eval_batches(size, 0, 1))


def choose_task(config: Config, source: DataSource, live: "UserObjects | None") -> Task:
    """The user's own loss as a task, or the one that has a name."""
    if not (live and live.criterion):
        return build_task(config, source)
    from multigpu_cli.tasks.criterion import Criterion  # late: most losses have a name

    return Criterion(source, config.task, live.criterion)


def build_task(config: Config, source: DataSource) -> Task:
    """The task that the user named, else the dataset's own."""
    name = config.task.name or source.task
    factory = factories.find_factory(name, TASKS, flag="--task")
    task = factories.call_factory(factory, {"source": source, "config": config.task}, config.task.args, where="task")
    if not isinstance(task, Task):
        raise RequestError(f"--task {name}: not a subclass of multigpu_cli.tasks.base.Task")
    return task


def _restore_checkpoint(state: TrainState, task: Task, spec: RunSpec, world: World) -> None:
    """One rank reads the checkpoint; the others get it from there, so only one machine needs the file."""
    if not spec.start.checkpoint:
        return
    path = Path(spec.start.checkpoint)
    saved: dict[str, Any] = run_on_main_rank(
        world, lambda: Checkpoint(path, read_manifest(path)).state(), by=spec.start.checkpoint_rank
    )
    state.restore(saved, spec.start.checkpoint)
    if not spec.same_length:  # more epochs are a new chance for a run that had stopped early
        state.progress.stopped_early, state.progress.stale_epochs = False, 0
    if saved.get("task"):
        state.restore_warning = task.load_state(saved["task"], world)


def _measure_buckets(spec: RunSpec, model: nn.Module, world: World) -> RunSpec:
    """--bucket-cap-mb auto, measured; a checkpoint pins it, since with several workers it decides who adds up what."""
    config = spec.config
    if config.communication.bucket_cap_mb != "auto" or world.size == 1 or config.reproducibility.exact:
        return spec
    from multigpu_cli.strategies.buckets import measure_cap

    return replace(spec, config=replace_settings(config, {"bucket_cap_mb": measure_cap(model, world)}))


def _build_strategy(model: nn.Module, world: World, spec: RunSpec) -> Strategy:
    config, placement, live = spec.config, spec.placement, spec.user_objects
    if config.reproducibility.exact:
        from multigpu_cli.strategies.exact import ExactReduction  # late, each of them: a run has one

        return ExactReduction(model, world)
    if placement.strategy == "dp":
        from multigpu_cli.strategies.data_parallel import DataParallel

        return DataParallel(model, placement.devices)
    if placement.strategy == "ddp":
        from multigpu_cli.strategies.distributed import Distributed

        return Distributed(model, world, config.communication, live.ddp if live else {})
    return Single(model)


_COMPILERS = {  # of what torch generates; on CUDA Triton builds what launches its kernels, in C
    "cpu": ("C++", ("g++", "c++", "clang++")),
    "cuda": ("C", ("gcc", "clang")),
}


def _compile_model(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
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
    return CompiledModel(model, None if wanted == "default" else wanted)
