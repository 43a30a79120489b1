"""Builds model, optimizer, task, strategy and loaders, before any file of the run is touched."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from multigpu_cli.checkpoint.run_folder import ResumePoint
from multigpu_cli.checkpoint.snapshot import Progress, TrainState
from multigpu_cli.checkpoint.store import Checkpoint
from multigpu_cli.checkpoint.weights import describe_code, name_changes
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.data.loader import Batch, first_batch
from multigpu_cli.distributed.world import World, broadcast_object, run_in_step, run_on_all_ranks, run_on_main_rank
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.eval_weights import EMAModel, is_schedule_free
from multigpu_cli.run.assembly.components import Loaders, TrainComponents
from multigpu_cli.run.assembly.model import BuiltModel, ModelFactory, smoke_test_batch
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.prepare import all_ranks_see
from multigpu_cli.run.request.spec import RunSpec, with_notes
from multigpu_cli.runtime.compile import CompiledModel, compile_model
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.strategies.base import Setup, Strategy, choose_strategy
from multigpu_cli.tasks.base import LossNormalizer, Task


def build_components(spec: RunSpec, world: World, parts: Sequence[Part] = ()) -> TrainComponents:
    """Build everything that learns, on this rank's device, and load its checkpoint; the caller closes the loaders.

    RequestError, the same on every rank: the model, the task, the weights or the first batch do not fit.
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
    kind = choose_strategy(spec.placement, world, exact=spec.config.reproducibility.exact)
    precision, first = Precision(spec.plan.precision, world.device), partial(first_batch, loaders.train, 2)
    built: BuiltModel = kind.build_model(ModelFactory(spec, world, task, first))
    code, changed = run_on_main_rank(world, lambda: _compare_code(spec, built.model))
    spec = replace(spec, code=code)
    model = run_on_all_ranks(world, lambda: compile_model(built.model, spec.config, world.device, built.blocks))
    for part in parts:
        part.model_built(built.model)
    if measured := kind.measure_settings(built.model, spec.config, world):
        spec = replace(spec, config=replace_settings(spec.config, measured))
    notes = spec.strategy.describe(built.model, spec.config, spec.plan.batches.workers)
    spec = with_notes(spec, **notes, first_weights=built.origin)
    strategy = build_strategy(model, built.average, world, spec, source=built.source)
    state = run_on_all_ranks(world, lambda: _build_state(spec, built, precision, strategy))
    strategy.attach_optimizer(state.optimizer)
    words = spec.factories.describe_optimizer(spec.config, state.model, state.optimizer)
    spec = replace(spec, plan=replace(spec.plan, optimizer=words))
    _restore_checkpoint(state, strategy, task, spec, world)
    state.restore_warning = "; ".join(filter(None, (changed, state.restore_warning)))
    spec.factories.check_restored(spec.plan)
    call = built.call
    if call is None:
        call = run_in_step(world, lambda: _try_model(spec, task, state, strategy, first))
    spec = with_notes(spec, model_call=call, logits=task.logits_note)
    task.equal_passes, precision.keeps_casts = strategy.sharded, strategy.keeps_casts
    units, compiled = LossNormalizer(task, world), model if isinstance(model, CompiledModel) else None
    return TrainComponents(spec, world, task, state, strategy, loaders, units, compiled=compiled)


def _compare_code(spec: RunSpec, model: nn.Module) -> tuple[dict[str, dict[str, str]], str]:
    """The record of the network's code, and a warning where the checkpoint has another, which --exact refuses."""
    manifest, origin, code = spec.resume_point.manifest, spec.resume_point.checkpoint, describe_code(model)
    if not (names := name_changes(manifest["settings"].get("code", {}), code) if manifest else ""):
        return code, ""
    problem = f"the model's {names} changed since {origin} was written"
    if spec.config.reproducibility.exact:
        remedy = f"the code of that time; or --init-from {origin} with another --save-dir"
        raise RequestError(f"--exact: {problem}", remedy=remedy)
    return code, f"{problem}: its weights, and the best so far, are of the code before"


def _build_state(spec: RunSpec, built: BuiltModel, precision: Precision, strategy: Strategy) -> TrainState:
    """The optimizer, over what the strategy has this process move, and what else a checkpoint covers."""
    optimizer = spec.factories.build_optimizer(spec.config, spec.plan, built.model, strategy)
    if is_schedule_free(optimizer):
        optimizer.train()  # type: ignore[attr-defined]  # the caller's own may be in the other mode
        if spec.config.optimizer.ema != "off":
            problem = f"--ema together with {type(optimizer).__name__}: a schedule-free optimizer averages by itself"
            raise RequestError(problem, remedy="leave out one of them")
    scheduler, weights = spec.factories.scheduler, built.initial_weights
    return TrainState(built.model, optimizer, precision, built.average, Progress(), scheduler, initial_weights=weights)


def _try_model(spec: RunSpec, task: Task, state: TrainState, strategy: Strategy, first: Callable[[], Batch]) -> str:
    """Try the first batch with a model that none was tried with when it was built; its passes may communicate."""
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
    if spec.strategy.sharded and own:
        raise RequestError(
            f"--task {spec.task} has its own `evaluate`: with --multi-gpu {spec.strategy.name} all workers have to run "
            "the model in it equally often",
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
        return run_on_all_ranks(world, lambda: strategy.load_sharded(shared, checkpoint.open_pieces().read))
    read = run_on_all_ranks(world, lambda: checkpoint.state() if reads else None)
    return strategy.scatter_state(read, source=point.checkpoint_rank)


def build_strategy(
    model: nn.Module, average: EMAModel | None, world: World, spec: RunSpec, *, source: int | None = 0
) -> Strategy:
    """What shares a step's work over the devices, for the parameters that learn now; see `Setup`."""
    kind = choose_strategy(spec.placement, world, exact=spec.config.reproducibility.exact)
    return kind.create(model, Setup(world, spec.placement, spec.config, average, source, spec.factories.ddp))
