"""Builds the network of a run on this rank, whole or without memory for its weights, and tries the first batch.

A network that is sharded may be larger than a device: until then it lies in host memory, and that on rank 0 only.
"""

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from multigpu_cli.checkpoint.initial_weights import WeightMatch, load_initial_weights
from multigpu_cli.checkpoint.weights import check_extra_state
from multigpu_cli.data.collate import describe_shapes
from multigpu_cli.data.load import FROM_MODEL
from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.collectives import all_gather_object, broadcast_object
from multigpu_cli.distributed.out_of_memory import is_out_of_memory
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import has_2d_convolutions, use_channels_last
from multigpu_cli.run.request.checks import check_state_fits
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.runtime.model_call import CallRecorder
from multigpu_cli.runtime.module_state import eval_mode, preserve_buffers
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.seeding import seed_weights
from multigpu_cli.tasks.base import Task

_CPU = torch.device("cpu")


class BuiltModel(NamedTuple):
    """The network of this rank.

    Attributes:
        call: how it is called, in words; empty as long as no batch was tried.
        initial_weights: what --init-from loaded, on rank 0.
        whole_because: why this rank has all weights in memory; empty where it has none.
        channels_last: kernels are laid out so, which was tried here.
    """

    model: nn.Module
    call: str = ""
    initial_weights: WeightMatch | None = None
    whole_because: str = ""
    channels_last: bool = False


def build_whole_model(spec: RunSpec, world: World, task: Task, first_batch: Callable[[], Batch]) -> BuiltModel:
    """The network on this rank's device, after its first batch.

    Raises:
        RequestError: it does not fit the weights, the task or the data.
    """
    model = _create_model(spec)
    weights = _load_initial_weights(spec, world, model)
    check_state_fits(spec, model, world.device)
    model.to(world.device).train()
    precision = Precision(spec.plan.precision, world.device)
    task.check_model(model, precision)
    call = try_first_batch(spec, task, model, precision, first_batch())
    check_extra_state(model, spec.model)
    return BuiltModel(model, call, weights, "each rank has the whole model")


def build_model_to_shard(spec: RunSpec, world: World, task: Task, first_batch: Callable[[], Batch]) -> BuiltModel:
    """The network on the meta device, where possible: but on rank 0 with the weights of the seed, in host memory.

    Where a checkpoint has all weights, no rank needs others; that of an adapter has what learns.

    Raises:
        RequestError: it can't be built, or does not fit the weights.
    """
    model, reason = None, spec.factories.whole_because or "it sends the weights"
    if not spec.factories.whole_because and (spec.resume_point.checkpoint or not world.is_main):
        model, reason = _build_without_weights(spec, world)
    if model is not None:
        return BuiltModel(model.train())
    model = _create_model(spec).train()
    weights = _load_initial_weights(spec, world, model)
    if any(map(is_lazy, model.parameters())):
        _create_lazy_weights(spec, task, model, first_batch())
    last = _keeps_layout(spec, world) and _try_channels_last(spec, task, model, first_batch())
    check_extra_state(model, spec.model)
    return BuiltModel(model, initial_weights=weights, whole_because=reason, channels_last=last)


def share_memory_format(spec: RunSpec, world: World, model: nn.Module, *, channels_last: bool) -> None:
    """With --exact kernels are laid out as without sharding, since the last bits depend on it: rank 0 has tried how.

    Else rows are gathered as they lie. All ranks call it together.
    """
    if spec.config.reproducibility.exact and broadcast_object(world, channels_last):
        use_channels_last(model)


def explain_initial_weights(world: World, built: BuiltModel) -> tuple[int | None, str]:
    """Agree on who has the first weights; all ranks call it together.

    Returns:
        The rank that sends them, None where a checkpoint has them all, and the explanation for the plan.

    Raises:
        RequestError: the ranks built different networks; the same on every rank.
    """
    everyone = all_gather_object(world, [_fingerprint_structure(built.model), built.whole_because])
    differing = [rank for rank, (structure, _) in enumerate(everyone) if structure != everyone[0][0]]
    if differing:
        raise RequestError(
            f"--model: rank {differing[0]} built other parameters or buffers than rank 0",
            remedy="a factory that builds the same network on the meta device and wherever it is called",
        )
    reasons = [reason for _, reason in everyone]
    if not any(reasons):
        return None, "no rank builds the weights: the checkpoint has them"
    if reason := next(filter(None, reasons[1:]), ""):
        return 0, f"each rank builds the whole model in host memory: {reason}"
    return 0, "rank 0 builds the weights in host memory, and each rank gets its rows"


def _create_model(spec: RunSpec) -> nn.Module:
    return spec.factories.build_model(spec.config, spec.source, reference=spec.has_reference)


def _build_without_weights(spec: RunSpec, world: World) -> tuple[nn.Module | None, str]:
    """The network on the meta device, or None with the reason against it."""
    from multigpu_cli.models.meta import (
        build_on_meta,
        find_unsaved_tensors,  # late: only sharded runs need it
    )

    seed_weights(spec.config.reproducibility.seed)  # so that only what the factory draws moves the generator
    model, reason = build_on_meta(lambda: _create_model(spec))
    if model is not None and _keeps_layout(spec, world) and has_2d_convolutions(model):
        return None, "the layout of its kernels is tried on it"
    if model is not None and world.is_main and (unsaved := find_unsaved_tensors(model)):
        return None, f"no checkpoint has {unsaved[0]}"
    return model, reason


def _load_initial_weights(spec: RunSpec, world: World, model: nn.Module) -> WeightMatch | None:
    """--init-from, on the rank from which the others get the weights."""
    if not spec.begins_from_weights or not world.is_main:
        return None
    config = spec.config.model
    return load_initial_weights(model, Path(str(config.init_from)), partial=config.init_partial)


def _create_lazy_weights(spec: RunSpec, task: Task, model: nn.Module, batch: Batch) -> None:
    """Let the first pass create weights, in host memory."""
    seed_weights(spec.config.reproducibility.seed, late=True)
    smoke_test_batch(spec, task, model, Precision(spec.plan.precision, _CPU), _move_to_host(batch))


def _keeps_layout(spec: RunSpec, world: World) -> bool:
    return world.is_main and spec.config.reproducibility.exact


def _try_channels_last(spec: RunSpec, task: Task, model: nn.Module, batch: Batch) -> bool:
    """Whether kernels are laid out with channels last, tried in host memory."""
    precision = Precision(spec.plan.precision, _CPU)
    return try_channels_last(spec, task, model, precision, _move_to_host(batch)) is not None


def _move_to_host(batch: Batch) -> Batch:
    inputs, targets = tree_map_only(Tensor, lambda tensor: tensor.to(_CPU), (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets)


def _fingerprint_structure(model: nn.Module) -> str:
    """A checksum over the names, shapes and formats of parameters and buffers."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    lines = [f"{name} {tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in tensors]
    return sha256("\n".join(lines).encode()).hexdigest()


def try_first_batch(spec: RunSpec, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> str:
    """Evaluate the batch, and choose the memory format by it.

    Channels last is taken if the model has 2-d convolutions and accepts the batch in it: a `.view` of features may not.

    Returns:
        how the model is called, in words.

    Raises:
        RequestError: the model does not accept the batch in any format.
    """
    if any(map(is_lazy, model.parameters())):  # the first pass creates their weights: before it there is no format
        seed_weights(spec.config.reproducibility.seed, late=True)
        smoke_test_batch(spec, task, model, precision, batch)
    call = try_channels_last(spec, task, model, precision, batch)
    return smoke_test_batch(spec, task, model, precision, batch) if call is None else call


def try_channels_last(spec: RunSpec, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> str | None:
    """Lay the kernels of 2-d convolutions out with channels last, if the model accepts the batch in it.

    Returns:
        how the model is called, in words; None where the layout is as it was.
    """
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

    Args:
        which: what to call it in a message.

    Returns:
        how the model is called, in words.

    Raises:
        RequestError: data, model and task do not fit together.
    """
    if isinstance(batch.inputs, list) and spec.placement.strategy == "dp":
        raise RequestError(
            "--multi-gpu dp would cut each part of a batch that is a list of samples", remedy="--multi-gpu ddp"
        )
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise RequestError(f"the embedding {name!r} has sparse=True: gradients are dense", remedy="sparse=False")
    mode, measure = (nullcontext(), task.loss_sum) if training else (eval_mode(model), task.measure)
    with CallRecorder(model) as seen:
        try:
            with preserve_buffers(model), mode, precision.autocast():
                measured = measure(model, batch)
            if isinstance(measured, Tensor) and not measured.requires_grad:
                raise ValueError("no parameter that learns is part of the loss")
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
    line = traceback.extract_tb(error.__traceback__)[-1]
    message = (str(error).splitlines() or [""])[0]
    classes = source.num_classes or source.num_outputs
    built = spec.factories.describe_model(config, source)
    lines = [
        f"--model {spec.model} does not take the {which} of --data {config.data.name}, or --task {spec.task} "
        "not what it returns",
        f"  {type(error).__name__} in {Path(line.filename).name}:{line.lineno}: {message}",
        *([f"  {built}"] if built else []),
        f"  it was called with  {describe_shapes(batch.inputs)}",
        *([f"  that is             {seen.describe()}"] if seen.describe() else []),
        f"  it returned         {describe_shapes(outputs[0]) if outputs else 'nothing: it failed itself'}",
        f"  the targets are     {'none' if batch.targets is None else describe_shapes(batch.targets)}",
        f"  the task expects    {task.expected_shapes}",
    ]
    remedy = _suggest_model(spec, outputs, classes) if outputs else "a model for these inputs"
    return RequestError("\n".join(lines), remedy=remedy + ("; --debug shows the traceback" if built else ""))


def _suggest_model(spec: RunSpec, outputs: list[Any], wanted: int) -> str:
    """A remedy for these outputs; the last dimension of (n, classes) and (n, t, classes) is their number."""
    found = outputs[0]
    if isinstance(found, tuple | dict) and spec.task != FROM_MODEL:
        return "--task from-model, for a model that gets the targets too and returns its loss; or another --model"
    if not isinstance(found, Tensor) or found.ndim not in (2, 3) or found.shape[-1] == wanted:
        return "another --model, or --task"
    return spec.factories.suggest_outputs(spec.config, spec.source, found.shape[-1], wanted)
