"""Builds model, task, optimizer, strategy and loaders, and tries a batch, before any file of the run is touched."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from multigpu_cli.checkpoint.initial_weights import WeightMatch, load_initial_weights
from multigpu_cli.checkpoint.run_folder import ResumePoint
from multigpu_cli.checkpoint.snapshot import Progress, TrainState
from multigpu_cli.checkpoint.store import Checkpoint
from multigpu_cli.checkpoint.weights import broadcast_weights, check_extra_state, describe_code, name_changes
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.data.collate import describe_shapes
from multigpu_cli.data.load import FROM_MODEL
from multigpu_cli.data.loader import Batch, first_batch
from multigpu_cli.distributed.world import (
    World,
    broadcast_object,
    is_out_of_memory,
    run_in_step,
    run_on_all_ranks,
    run_on_main_rank,
)
from multigpu_cli.errors import RequestError
from multigpu_cli.faults.explain import name_small_embedding, remedy_for
from multigpu_cli.models.build import use_channels_last
from multigpu_cli.optimizers.eval_weights import EMAModel, is_schedule_free, list_unsaved_parameters
from multigpu_cli.run.assembly.components import Loaders, TrainComponents
from multigpu_cli.run.global_batch import check_global_loss
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.checks import check_state_fits
from multigpu_cli.run.request.prepare import all_ranks_see
from multigpu_cli.run.request.spec import RunSpec, with_notes
from multigpu_cli.runtime.compile import CompiledModel, compile_model
from multigpu_cli.runtime.factories import describe_error
from multigpu_cli.runtime.model_call import CallRecorder
from multigpu_cli.runtime.module_state import eval_mode, preserve_buffers
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.seeding import seed_weights
from multigpu_cli.strategies.base import Setup, Strategy, choose_strategy
from multigpu_cli.tasks.base import LossNormalizer, Task


class BuiltModel(NamedTuple):
    """The network of this rank."""

    model: nn.Module
    call: str | None  # how it is called, in words; None as long as no batch was tried
    initial_weights: WeightMatch | None  # what --init-from loaded, on rank 0
    average: EMAModel | None  # its exponential moving average, with --ema
    blocks: Sequence[nn.Module] = ()  # what --compile compiles by itself; none for the whole
    source: int | None = None  # the rank that has the weights, where only one has; None: each, or a checkpoint
    origin: str = ""  # where they come from, for the plan, unless each rank has them


class ModelFactory(NamedTuple):
    """What a strategy builds a run's network from."""

    spec: RunSpec
    world: World
    task: Task
    first_batch: Callable[[], Batch]

    def build_whole(self) -> BuiltModel:
        """The network on each rank's device, after a first batch that fits it; all ranks call it together."""
        model, call, weights = run_on_all_ranks(self.world, self._build)
        if self.spec.factories.whole_because or self.spec.begins_from_weights:
            broadcast_weights(model, self.world)
        ema = self.spec.config.optimizer.ema
        average = None if ema == "off" else EMAModel(model, float(ema), list_unsaved_parameters(model))
        return BuiltModel(model, call, weights, average)

    def _build(self) -> tuple[nn.Module, str, WeightMatch | None]:
        spec, device = self.spec, self.world.device
        model = create_model(spec)
        weights = load_weights_to_send(spec, self.world, model)
        check_state_fits(spec, model, device)
        model.to(device).train()
        precision = Precision(spec.plan.precision, device)
        self.task.check_model(model, precision)
        call = try_first_batch(spec, self.task, model, precision, self.first_batch())
        check_extra_state(model, spec.model)
        return model, call, weights


def create_model(spec: RunSpec) -> nn.Module:
    return spec.factories.build_model(spec.config, spec.source, reference=spec.has_reference)


def load_weights_to_send(spec: RunSpec, world: World, model: nn.Module) -> WeightMatch | None:
    """--init-from, on the rank from which the others get the weights."""
    if not spec.begins_from_weights or not world.is_main:
        return None
    config = spec.config.model
    return load_initial_weights(model, Path(str(config.init_from)), partial=config.init_partial)


def try_first_batch(spec: RunSpec, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> str:
    """Evaluate the batch, and choose the memory format by it; returns how the model is called, in words.

    Channels last is taken if the model has 2-d convolutions and accepts the batch in it: a `.view` of features may not.
    RequestError: the model does not accept the batch in any format.
    """
    if any(map(is_lazy, model.parameters())):  # the first pass creates their weights: before it there is no format
        seed_weights(spec.config.reproducibility.seed, late=True)
        smoke_test_batch(spec, task, model, precision, batch)
    call = try_channels_last(spec, task, model, precision, batch)
    return smoke_test_batch(spec, task, model, precision, batch) if call is None else call


def try_channels_last(spec: RunSpec, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> str | None:
    """Lay 2-d convolutions out with channels last, if the model takes the batch so; how it is called, or else None."""
    if use_channels_last(model):
        try:
            return smoke_test_batch(spec, task, model, precision, batch)
        except RequestError:
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return None


def smoke_test_batch(
    spec: RunSpec,
    task: Task,
    model: nn.Module,
    precision: Precision,
    batch: Batch,
    *,
    training: bool = False,
    which: str = "first batch",
) -> str:
    """Evaluate a batch, or with `training` compute its loss: some models return something else in training.

    Returns how the model is called, in words; messages name the batch by `which`. RequestError: they do not fit.
    """
    if isinstance(batch.inputs, list) and spec.placement.strategy == "dp":
        problem = "--multi-gpu dp would cut each part of a batch that is a list of samples"
        raise RequestError(problem, remedy="--multi-gpu ddp")
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise RequestError(f"the embedding {name!r} has sparse=True: gradients are dense", remedy="sparse=False")
    mode, measure = (nullcontext(), task.loss_sum) if training else (eval_mode(model), task.measure)
    with CallRecorder(model) as seen:
        try:
            with preserve_buffers(model), mode, precision.autocast():
                measured = measure(model, batch)
            if isinstance(measured, Tensor) and not measured.requires_grad:
                raise ValueError("no trainable parameter is part of the loss")
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            if is_out_of_memory(error):
                raise
            raise _mismatch_error(spec, task, batch, seen, error, which) from error
    return seen.describe()


def _mismatch_error(
    spec: RunSpec, task: Task, batch: Batch, seen: CallRecorder, error: Exception, which: str
) -> RequestError:
    """What the model was called with, what it returned, and what the task expects."""
    source, config, outputs = spec.source, spec.config, seen.outputs
    name_small_embedding(error)
    classes = source.num_classes or source.num_outputs
    built = spec.factories.describe_model(config, source)
    lines = [
        f"--model {spec.model} does not take the {which} of --data {config.data.name}, or --task {spec.task} "
        "not what it returns",
        f"  {describe_error(error)}",
        *(f"  {note}" for note in getattr(error, "__notes__", ())),
        *([f"  {built}"] if built else []),
        f"  it was called with  {describe_shapes(batch.inputs)}",
        *([f"  that is             {seen.describe()}"] if seen.describe() else []),
        f"  it returned         {describe_shapes(outputs[0]) if outputs else 'nothing: it failed itself'}",
        f"  the targets are     {'none' if batch.targets is None else describe_shapes(batch.targets)}",
        f"  the task expects    {task.expected_shapes}",
    ]
    target = batch.targets[0] if isinstance(batch.targets, Tensor) and batch.targets.ndim else batch.targets
    fits = (task.suggest_task(target) or _suggest_model(spec, outputs, classes)) if outputs else ""
    remedy = fits or remedy_for(error) or "a model for these inputs"
    return RequestError("\n".join(lines), remedy=remedy + ("; --debug shows the traceback" if built else ""))


def _suggest_model(spec: RunSpec, outputs: list[Any], wanted: int) -> str:
    """A remedy for these outputs; the last dimension of (n, classes) and (n, t, classes) is their number."""
    found = outputs[0]
    if isinstance(found, tuple | dict) and spec.task != FROM_MODEL:
        return "--task from-model, for a model that gets the targets too and returns its loss; or another --model"
    if not isinstance(found, Tensor) or found.ndim not in (2, 3) or found.shape[-1] == wanted:
        return "another --model, or --task"
    return spec.factories.suggest_outputs(spec.config, spec.source, found.shape[-1], wanted)


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
    check_global_loss(spec, task)
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
            own = f"{type(optimizer).__name__}: a schedule-free optimizer averages by itself"
            raise RequestError(f"--ema can't be used with {own}", remedy="leave out one of them")
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
        reason = f"with --multi-gpu {spec.strategy.name} all workers have to run the model in it equally often"
        remedy = "supports_equal_passes = True in the class if they do; or --multi-gpu ddp"
        raise RequestError(f"--task {spec.task} has its own `evaluate`: {reason}", remedy=remedy)
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
    own = {"model": state.model.state_dict()}
    if state.average:
        own["average"] = state.average.state_dict()
    saved = _read_checkpoint(point, strategy, world, own)
    state.restore(saved, point.checkpoint)
    if not spec.same_length:  # with more epochs, a run that stopped early goes on
        state.progress.stopped_early, state.progress.stale_epochs = False, 0
    if saved.get("task"):
        state.restore_warning = task.load_state(saved["task"], world)


def _read_checkpoint(point: ResumePoint, strategy: Strategy, world: World, own: Mapping[str, Any]) -> dict[str, Any]:
    """The state that this rank loads: each reads its rows, if all see pieces; else one reads for all, into `own`."""
    reads = world.rank == point.checkpoint_rank
    checkpoint = Checkpoint(Path(str(point.checkpoint)), point.manifest or {})
    if checkpoint.in_pieces and all_ranks_see(point, world):
        outline = run_on_all_ranks(world, lambda: checkpoint.outline() if reads else None)
        shared: dict[str, Any] = broadcast_object(world, outline, source=point.checkpoint_rank)
        return run_on_all_ranks(world, lambda: strategy.load_sharded(shared, checkpoint.open_pieces().read))
    read = run_on_all_ranks(world, lambda: checkpoint.state() if reads else None)
    return strategy.scatter_state(read, source=point.checkpoint_rank, into=own)


def build_strategy(
    model: nn.Module, average: EMAModel | None, world: World, spec: RunSpec, *, source: int | None = None
) -> Strategy:
    """What shares a step's work over the devices, for the parameters that learn now; see `Setup`."""
    kind = choose_strategy(spec.placement, world, exact=spec.config.reproducibility.exact)
    return kind.create(model, Setup(world, spec.placement, spec.config, average, source, spec.factories.ddp))
