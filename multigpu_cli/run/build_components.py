"""Builds model, optimizer, task, strategy and loaders, before any file of the run is touched."""

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from multigpu_cli.checkpoint.initial_weights import load_initial_weights
from multigpu_cli.checkpoint.manifest import read_manifest
from multigpu_cli.checkpoint.snapshot import Progress, TrainState
from multigpu_cli.checkpoint.store import Checkpoint
from multigpu_cli.checkpoint.weights import check_extra_state
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.data.batch_stream_protocol import BatchStream
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.loader import Batch
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import adapt_model, build_model, is_of_transformers, prepare_model
from multigpu_cli.models.rate_factors import compute_rate_factors
from multigpu_cli.optimizers import EMAModel, build_optimizer
from multigpu_cli.run.build_task import build_task
from multigpu_cli.run.components import Loaders, TrainComponents
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.run.try_first_batch import try_first_batch
from multigpu_cli.runtime.compile import CompiledModel, compile_model
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks
from multigpu_cli.runtime.seeding import seed_weights
from multigpu_cli.runtime.world import World
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.strategies.single import Single
from multigpu_cli.tasks.base import Task
from multigpu_cli.tasks.loss_units import LossNormalizer
from multigpu_cli.tasks.open_data import FROM_MODEL

if TYPE_CHECKING:
    from multigpu_cli.run.user_objects import UserObjects


def build_components(spec: RunSpec, world: World) -> TrainComponents:
    """Build everything that learns, on this rank's device, and load its checkpoint; the caller closes the loaders.

    Raises:
        RequestError: the model, the task, the weights or the first batch do not fit; the same on every rank.
    """
    task = run_on_all_ranks(world, lambda: _build_task(spec, spec.user_objects))
    with ExitStack() as on_failure:  # loader processes would outlive it, in a process that goes on
        loaders = run_on_all_ranks(world, lambda: _build_loaders(spec, world, task, on_failure))
        components = _build_learner(spec, world, task, loaders)
        on_failure.pop_all()
    return components


def _build_learner(spec: RunSpec, world: World, task: Task, loaders: Loaders) -> TrainComponents:
    """Build the model and what trains it, and load the checkpoint."""
    state, call = run_on_all_ranks(world, lambda: _build_state(spec, world, task, loaders.train))
    spec = replace(spec, plan=replace(spec.plan, model_call=call))
    if spec.user_objects or spec.begins_from_weights:
        from multigpu_cli.run.user_objects import broadcast_weights  # late, like each import below: few runs need it

        broadcast_weights(state.model, world)
        if state.average:
            state.average.module.load_state_dict(state.model.state_dict())
    model = run_on_all_ranks(world, lambda: compile_model(state.model, spec.config, world.device))
    spec = _measure_buckets(spec, state.model, world)
    spec, strategy = _describe_sharding(spec, state.model), build_strategy(model, state, world, spec)
    _restore_checkpoint(state, strategy, task, spec, world)
    task.equal_passes, state.precision.keeps_casts = strategy.sharded, not strategy.sharded
    units, compiled = LossNormalizer(task, world), model if isinstance(model, CompiledModel) else None
    return TrainComponents(spec, world, task, state, strategy, loaders, units, compiled=compiled)


def _build_state(spec: RunSpec, world: World, task: Task, train: BatchStream) -> tuple[TrainState, str]:
    """Everything that is built without communication, so that an error on one rank can be raised on all.

    Returns:
        the state, and in words how the model is called.
    """
    config, source = spec.config, spec.source
    live = spec.user_objects
    model = prepare_model(adapt_live(config, live), config.model, spec.model) if live else init_model(config, source)
    weights = None
    if spec.begins_from_weights and world.is_main:  # the others get them from there
        weights = load_initial_weights(model, Path(str(config.model.init_from)), partial=config.model.init_partial)
    model.to(world.device).train()
    precision = Precision(spec.plan.precision, world.device)
    task.check_model(model, precision)
    call = try_first_batch(spec, task, model, precision, first_batch(train, 2))
    check_extra_state(model, spec.model)
    ema = config.optimizer.ema
    average = None if ema == "off" else EMAModel(model, float(ema))
    optimizer = (live and live.prepare_optimizer(model)) or build_optimizer(
        model, config.optimizer, compute_rate_factors(model, config.optimizer)
    )
    scheduler = live.scheduler if live else None
    return TrainState(model, optimizer, precision, average, Progress(), scheduler, initial_weights=weights), call


def _build_task(spec: RunSpec, live: "UserObjects | None") -> Task:
    if live:
        return build_task(spec.config, spec.source, live.criterion, has_logits=is_of_transformers(live.model))
    task = build_task(spec.config, spec.source)
    if spec.placement.strategy == "fsdp" and type(task).evaluate is not Task.evaluate:
        raise RequestError(
            f"--task {spec.task}: a task with its own `evaluate` is not for --multi-gpu fsdp yet",
            remedy="a task that leaves `evaluate` as it is, or --multi-gpu ddp",
        )
    return task


def adapt_live(config: Config, live: "UserObjects") -> nn.Module:
    """The user's own model, as tasks call it; a criterion may want the whole output of one of transformers."""
    whole = live.criterion is not None or config.task.name == FROM_MODEL
    return adapt_model(live.model, whole_output=whole)


def init_model(config: Config, source: DataSource) -> nn.Module:
    """The model with weights drawn from the seed; the dataset's own model if the user named none."""
    task = config.task.name or source.task
    offered = {
        "input_shape": source.input_shape,
        "num_classes": source.num_classes or source.num_outputs,
        "task": task,
        "mode": config.data.mode,
        "seed": config.reproducibility.seed,
    } | dict(source.model_kwargs)
    if config.model.dir is not None:
        offered["model_dir"] = config.model.dir
    seed_weights(config.reproducibility.seed)
    name = config.model.name or source.model
    return build_model(config.model, name, offered, whole_output=task == FROM_MODEL)


def _build_loaders(spec: RunSpec, world: World, task: Task, on_failure: ExitStack) -> Loaders:
    """The loaders of each split, which `on_failure` closes."""
    source, data, seed = spec.source, spec.config.data, spec.config.reproducibility.seed
    held_out = {"val": source.val, "test": source.test}
    val, test = (
        None if part is None else on_failure.enter_context(closing(task.loader(name, data, world, seed)))
        for name, part in held_out.items()
    )
    return Loaders(on_failure.enter_context(closing(task.train_stream(data, world, seed))), val, test)


def first_batch(loader: BatchStream, size: int) -> Batch:
    """The first `size` samples, or all if there are fewer, unshuffled: the same on every rank, and at every start."""
    return next(loader.eval_batches(min(size, loader.size), 0, 1))


def _restore_checkpoint(state: TrainState, strategy: Strategy, task: Task, spec: RunSpec, world: World) -> None:
    """One rank reads the checkpoint and sends it to the others, so only one machine needs the file."""
    point = spec.resume_point
    if not point.checkpoint:
        return
    path, reads = Path(point.checkpoint), world.rank == point.checkpoint_rank
    read = run_on_all_ranks(world, lambda: Checkpoint(path, read_manifest(path)).state() if reads else None)
    saved: dict[str, Any] = strategy.scatter_state(read, source=point.checkpoint_rank)
    state.restore(saved, point.checkpoint)
    if not spec.same_length:  # with more epochs, a run that stopped early goes on
        state.progress.stopped_early, state.progress.stale_epochs = False, 0
    if saved.get("task"):
        state.restore_warning = task.load_state(saved["task"], world)


def _measure_buckets(spec: RunSpec, model: nn.Module, world: World) -> RunSpec:
    """Measure --bucket-cap-mb auto; a checkpoint pins it, because the order of summation depends on it."""
    config, has_buckets = spec.config, spec.placement.strategy == "ddp" and world.size > 1
    if config.communication.bucket_cap_mb != "auto" or not has_buckets or config.reproducibility.exact:
        return spec
    from multigpu_cli.strategies.buckets import measure_cap

    return replace(spec, config=replace_settings(config, {"bucket_cap_mb": measure_cap(model, world)}))


def _describe_sharding(spec: RunSpec, model: nn.Module) -> RunSpec:
    """The request with what --multi-gpu fsdp gathers as one in its plan.

    Raises:
        RequestError: strategy.wrap matches nothing.
    """
    if spec.placement.strategy != "fsdp":
        return spec
    from multigpu_cli.models.blocks import describe_blocks, find_blocks_to_wrap

    device = spec.config.device
    blocks = describe_blocks(model, find_blocks_to_wrap(model, device.wrap))
    freed = "each pass" if device.reshard == "forward" else "the step"
    words = f"by {blocks}; gathered weights are freed after {freed}"
    words = words if spec.plan.batches.workers > 1 else "none: one process holds everything"
    return replace(spec, plan=replace(spec.plan, sharding=words))


def build_strategy(model: nn.Module, state: TrainState, world: World, spec: RunSpec) -> Strategy:
    """What shares a step's work over the devices, for the parameters that learn now."""
    config, placement, live = spec.config, spec.placement, spec.user_objects
    if config.reproducibility.exact:
        from multigpu_cli.strategies.exact import ExactReduction

        return ExactReduction(model, world)
    if placement.strategy == "dp":
        from multigpu_cli.strategies.data_parallel import DataParallel

        return DataParallel(model, placement.devices)
    if placement.strategy == "ddp" and not placement.num_processes_to_launch:  # a dry run starts no other processes
        from multigpu_cli.strategies.distributed import Distributed

        return Distributed(model, world, config.communication, live.ddp if live else {})
    if placement.strategy == "fsdp" and world.size > 1:
        from multigpu_cli.models.blocks import find_blocks_to_wrap
        from multigpu_cli.strategies.sharded import Sharded

        return Sharded(
            model,
            world,
            state.optimizer,
            state.average and state.average.module,
            blocks=find_blocks_to_wrap(model, config.device.wrap),
            keeps_weights=config.device.reshard == "step",
        )
    return Single(model)
