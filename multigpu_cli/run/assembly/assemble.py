"""Builds model, optimizer, task, strategy and loaders, before any file of the run is touched."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from multigpu_cli.checkpoint.run_folder import ResumePoint
from multigpu_cli.checkpoint.snapshot import Progress, TrainState
from multigpu_cli.checkpoint.store import Checkpoint
from multigpu_cli.checkpoint.weights import broadcast_weights, describe_code, name_changes
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.data.loader import Batch, first_batch
from multigpu_cli.distributed.collectives import broadcast_object, run_on_all_ranks, run_on_main_rank, run_without_vote
from multigpu_cli.distributed.out_of_memory import return_freed_tensors
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.eval_weights import EMAModel, is_schedule_free, list_unsaved_parameters
from multigpu_cli.run.assembly.components import Loaders, TrainComponents
from multigpu_cli.run.assembly.model import (
    BuiltModel,
    build_model_to_shard,
    build_whole_model,
    explain_initial_weights,
    share_memory_format,
    smoke_test_batch,
)
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.prepare import all_ranks_see
from multigpu_cli.run.request.spec import RunSpec, with_notes
from multigpu_cli.runtime.compile import CompiledModel, compile_model
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.strategies.base import Single, Strategy
from multigpu_cli.tasks.base import LossNormalizer, Task


def build_components(spec: RunSpec, world: World, parts: Sequence[Part] = ()) -> TrainComponents:
    """Build everything that learns, on this rank's device, and load its checkpoint; the caller closes the loaders.

    Args:
        parts: are told what was built.

    Raises:
        RequestError: the model, the task, the weights or the first batch do not fit; the same on every rank.
    """
    task = run_on_all_ranks(world, lambda: _build_task(spec))
    for part in parts:
        part.task_built(task)
    with ExitStack() as on_failure:  # loader processes would outlive it, in a process that goes on
        loaders = run_on_all_ranks(world, lambda: _build_loaders(spec, world, task, on_failure))
        components = _build_learner(spec, world, task, loaders, parts)
        for part in parts:
            part.built(components)
            components.spec = with_notes(components.spec, **part.plan_notes())
        on_failure.pop_all()
    return components


def _build_learner(spec: RunSpec, world: World, task: Task, loaders: Loaders, parts: Sequence[Part]) -> TrainComponents:
    """Build the model and what trains it, and load the checkpoint."""
    shards = spec.placement.divides_model(world)
    precision, first = Precision(spec.plan.precision, world.device), partial(first_batch, loaders.train, 2)
    build = build_model_to_shard if shards else build_whole_model
    if shards:
        return_freed_tensors()
    built = run_on_all_ranks(world, lambda: build(spec, world, task, first))
    code, changed = run_on_main_rank(world, lambda: _compare_code(spec, built.model))
    spec = replace(spec, code=code)
    if shards:
        share_memory_format(spec, world, built.model, channels_last=built.channels_last)
    if (spec.factories.whole_because or spec.begins_from_weights) and not shards:
        broadcast_weights(built.model, world)
    source, start = explain_initial_weights(world, built) if shards else (0, "")
    average = _copy_for_average(spec.config, built.model, shards=shards)
    blocks = _find_compiled_blocks(spec, built.model, world)
    model = run_on_all_ranks(world, lambda: compile_model(built.model, spec.config, world.device, blocks))
    for part in parts:
        part.model_built(built.model)
    spec = _measure_buckets(spec, built.model, world)
    spec = _describe_sharding(spec, built.model, start)
    strategy = build_strategy(model, average, world, spec, source=source)
    state = run_on_all_ranks(world, lambda: _build_state(spec, built, average, precision, strategy))
    strategy.attach_optimizer(state.optimizer)
    words = spec.factories.describe_optimizer(spec.config, state.model, state.optimizer)
    spec = replace(spec, plan=replace(spec.plan, optimizer=words))
    _restore_checkpoint(state, strategy, task, spec, world)
    state.restore_warning = "; ".join(filter(None, (changed, state.restore_warning)))
    spec.factories.check_restored(spec.plan)
    call = run_without_vote(world, lambda: _try_sharded(spec, task, state, strategy, first)) if shards else built.call
    spec = with_notes(spec, model_call=call, logits=task.logits_note)
    task.equal_passes, precision.keeps_casts = strategy.sharded, strategy.keeps_casts
    units, compiled = LossNormalizer(task, world), model if isinstance(model, CompiledModel) else None
    return TrainComponents(spec, world, task, state, strategy, loaders, units, compiled=compiled)


def _compare_code(spec: RunSpec, model: nn.Module) -> tuple[dict[str, dict[str, str]], str]:
    """The record of the network's code, and a warning where the checkpoint has another.

    Raises:
        RequestError: it has, and --exact is on.
    """
    manifest, origin, code = spec.resume_point.manifest, spec.resume_point.checkpoint, describe_code(model)
    if not (names := name_changes(manifest["settings"].get("code", {}), code) if manifest else ""):
        return code, ""
    problem = f"the model's {names} changed since {origin} was written"
    if spec.config.reproducibility.exact:
        remedy = f"the code of that time; or --init-from {origin} with another --save-dir"
        raise RequestError(f"--exact: {problem}", remedy=remedy)
    return code, f"{problem}: its weights, and the best so far, are of the code before"


def _copy_for_average(config: Config, model: nn.Module, *, shards: bool) -> EMAModel | None:
    """The exponential moving average of --ema; where it will be sharded, without memory for its weights."""
    ema = config.optimizer.ema
    if ema == "off":
        return None
    if shards:
        from multigpu_cli.models.meta import copy_to_meta

        return EMAModel(copy_to_meta(model), float(ema))
    return EMAModel(model, float(ema), list_unsaved_parameters(model))


def _build_state(
    spec: RunSpec, built: BuiltModel, average: EMAModel | None, precision: Precision, strategy: Strategy
) -> TrainState:
    """The optimizer, over what the strategy has this process move, and what else a checkpoint covers."""
    optimizer = spec.factories.build_optimizer(spec.config, spec.plan, built.model, strategy)
    if is_schedule_free(optimizer):
        optimizer.train()  # type: ignore[attr-defined]  # the caller's own may be in the other mode
        _check_schedule_free(spec, type(optimizer).__name__, strategy)
    scheduler, weights = spec.factories.scheduler, built.initial_weights
    return TrainState(built.model, optimizer, precision, average, Progress(), scheduler, initial_weights=weights)


def _check_schedule_free(spec: RunSpec, name: str, strategy: Strategy) -> None:
    if spec.config.optimizer.ema != "off":
        raise RequestError(
            f"--ema together with {name}: a schedule-free optimizer averages by itself", remedy="leave out one of them"
        )
    if strategy.sharded and spec.config.device.reshard == "step":
        raise RequestError(
            f"--reshard step together with {name}: weights that an evaluation gathered would stay for the next step, "
            "and those of a schedule-free optimizer are others",
            remedy="--reshard forward",
        )


def _try_sharded(spec: RunSpec, task: Task, state: TrainState, strategy: Strategy, first: Callable[[], Batch]) -> str:
    """Try the first batch with a model that is on no device whole: all ranks do it together."""
    task.check_model(state.model, state.precision)
    batch = first()
    try:
        return smoke_test_batch(spec, task, state.model, state.precision, batch)
    except RequestError as error:
        strategy.explain_failure(error.__cause__ or error, lambda: task.measure(state.model, batch))
        raise


def _build_task(spec: RunSpec) -> Task:
    task = spec.factories.build_task(spec.config, spec.source)
    own = type(task).evaluate is not Task.evaluate and not task.supports_equal_passes
    if spec.placement.shards and own:
        raise RequestError(
            f"--task {spec.task} has its own `evaluate`: with --multi-gpu fsdp all workers have to run the model in it "
            "equally often",
            remedy="supports_equal_passes = True in the class if they do; or --multi-gpu ddp",
        )
    return task


def _build_loaders(spec: RunSpec, world: World, task: Task, on_failure: ExitStack) -> Loaders:
    """The loaders of each split, which `on_failure` closes."""
    source, data, seed = spec.source, spec.config.data, spec.config.reproducibility.seed
    held_out = {"val": source.val, "test": source.test}
    val, test = (
        None if part is None else on_failure.enter_context(closing(task.loader(name, data, world, seed)))
        for name, part in held_out.items()
    )
    return Loaders(on_failure.enter_context(closing(task.train_stream(data, world, seed))), val, test)


def _restore_checkpoint(state: TrainState, strategy: Strategy, task: Task, spec: RunSpec, world: World) -> None:
    """Load the checkpoint, and what follows from it."""
    point = spec.resume_point
    if not point.checkpoint:
        return
    saved = _read_checkpoint(point, strategy, world)
    state.restore(saved, point.checkpoint)
    if not spec.same_length:  # with more epochs, a run that stopped early goes on
        state.progress.stopped_early, state.progress.stale_epochs = False, 0
    if saved.get("task"):
        state.restore_warning = task.load_state(saved["task"], world)


def _read_checkpoint(point: ResumePoint, strategy: Strategy, world: World) -> dict[str, Any]:
    """The state that this rank loads: each reads its rows, if all see pieces; else one reads for all."""
    checkpoint, reads = (
        Checkpoint(Path(str(point.checkpoint)), point.manifest or {}),
        world.rank == point.checkpoint_rank,
    )
    if checkpoint.in_pieces and all_ranks_see(point, world):
        outline = run_on_all_ranks(world, lambda: checkpoint.outline() if reads else None)
        shared: dict[str, Any] = broadcast_object(world, outline, source=point.checkpoint_rank)
        return run_on_all_ranks(world, lambda: strategy.read_state(shared, checkpoint.open_pieces().read))
    read = run_on_all_ranks(world, lambda: checkpoint.state() if reads else None)
    return strategy.scatter_state(read, source=point.checkpoint_rank)


def _measure_buckets(spec: RunSpec, model: nn.Module, world: World) -> RunSpec:
    """Measure --bucket-cap-mb auto; a checkpoint pins it, because the order of summation depends on it."""
    config, has_buckets = spec.config, spec.placement.strategy == "ddp" and world.size > 1
    if config.communication.bucket_cap_mb != "auto" or not has_buckets or config.reproducibility.exact:
        return spec
    from multigpu_cli.strategies.ddp import measure_cap

    return replace(spec, config=replace_settings(config, {"bucket_cap_mb": measure_cap(model, world)}))


def _find_compiled_blocks(spec: RunSpec, model: nn.Module, world: World) -> list[nn.Module]:
    """What --compile compiles by itself, since its weights are gathered by themselves; [] for the whole model."""
    if spec.config.model.compile == "off" or not spec.placement.divides_model(world):
        return []
    from multigpu_cli.models.blocks import find_blocks_to_wrap

    return [model.get_submodule(name) for name in find_blocks_to_wrap(model, spec.config.device.wrap) or [""]]


def _describe_sharding(spec: RunSpec, model: nn.Module, start: str) -> RunSpec:
    """The request with what --multi-gpu fsdp gathers as one in its plan.

    Args:
        start: where the first weights come from.

    Raises:
        RequestError: strategy.wrap matches nothing.
    """
    if not spec.placement.shards:
        return spec
    from multigpu_cli.models.blocks import describe_blocks, find_blocks_to_wrap

    device = spec.config.device
    blocks = describe_blocks(model, find_blocks_to_wrap(model, device.wrap))
    freed, workers = "each pass" if device.reshard == "forward" else "the step", spec.plan.batches.workers
    groups = f" within groups of {device.shard_size} workers" if device.shard_size not in (None, workers) else ""
    words = f"by {blocks}{groups}; gathered weights are freed after {freed}"
    words = words if workers > 1 else "none: one process holds everything"
    return with_notes(spec, sharding=words, first_weights=start)


def build_strategy(
    model: nn.Module, average: AveragedModel | None, world: World, spec: RunSpec, *, source: int | None = 0
) -> Strategy:
    """What shares a step's work over the devices, for the parameters that learn now.

    Args:
        source: the rank that has the weights, where only one has; None: none has.
    """
    config, placement = spec.config, spec.placement
    if placement.divides_model(world):
        return _shard(model, average, world, config, source)
    if config.reproducibility.exact:
        from multigpu_cli.strategies.exact import ExactReduction

        return ExactReduction(model, world)
    if placement.strategy == "dp":
        from multigpu_cli.strategies.base import DataParallel

        return DataParallel(model, placement.devices)
    if placement.strategy == "ddp" and not placement.num_processes_to_launch:  # a dry run starts no other processes
        from multigpu_cli.strategies.ddp import Distributed

        return Distributed(model, world, config.communication, spec.factories.ddp)
    return Single(model)


def _shard(
    model: nn.Module, average: AveragedModel | None, world: World, config: Config, source: int | None
) -> Strategy:
    """Divide the model and its average over the processes."""
    from multigpu_cli.models.blocks import find_blocks_to_wrap
    from multigpu_cli.strategies.fsdp.exact import ExactSharded
    from multigpu_cli.strategies.fsdp.fsdp import Sharded

    whole, device = model.model if isinstance(model, CompiledModel) else model, config.device
    sharded = (ExactSharded if config.reproducibility.exact else Sharded)(
        whole,
        world,
        average=average and average.module,
        blocks=find_blocks_to_wrap(whole, device.wrap),
        keeps_weights=device.reshard == "step",
        source=source,
        shard_size=device.shard_size,
        finds_unused=config.communication.find_unused_parameters,
    )
    sharded.callable = model
    return sharded
