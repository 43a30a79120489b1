"""Builds the network of a run on this rank: whole on its device, or, to be sharded, without memory for its weights.

A network that is sharded may be larger than a device: until then it lies in host memory, and that on rank 0 only.
"""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from multigpu_cli.checkpoint.initial_weights import WeightMatch, load_initial_weights
from multigpu_cli.checkpoint.weights import check_extra_state
from multigpu_cli.config.schema import Config
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.loader import Batch
from multigpu_cli.errors import RequestError
from multigpu_cli.models.adapter import REFERENCE, set_reference
from multigpu_cli.models.build import (
    adapt_model,
    build_model,
    find_adapter,
    has_2d_convolutions,
    prepare_model,
    use_channels_last,
)
from multigpu_cli.run.check_memory import check_state_fits
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.run.try_first_batch import smoke_test_batch, try_channels_last, try_first_batch
from multigpu_cli.runtime.collectives import all_gather_object, broadcast_object
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.seeding import seed_weights
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.base import Task
from multigpu_cli.tasks.open_data import FROM_MODEL

if TYPE_CHECKING:
    from multigpu_cli.run.user_objects import UserObjects

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
    model, reason = None, "it sends the weights"
    if spec.user_objects:
        reason = "it is the caller's own"
    elif spec.resume_point.checkpoint or not world.is_main:
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


def adapt_live(config: Config, live: "UserObjects") -> nn.Module:
    """The user's own model, as tasks call it; a criterion may want the whole output of one of transformers."""
    whole = live.criterion is not None or config.task.name == FROM_MODEL
    return adapt_model(live.model, whole_output=whole)


def init_model(config: Config, source: DataSource, *, reference: bool = False) -> nn.Module:
    """The model with weights drawn from the seed; the dataset's own model if the user named none.

    Args:
        reference: see `RunSpec.has_reference`.
    """
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
    adapt = find_adapter(config, reference=reference)
    return build_model(config.model, name, offered, whole_output=task == FROM_MODEL, adapt=adapt)


def _create_model(spec: RunSpec) -> nn.Module:
    config, live = spec.config, spec.user_objects
    if live:
        return prepare_model(adapt_live(config, live), config.model, spec.model)
    return init_model(config, spec.source, reference=spec.has_reference)


def _build_without_weights(spec: RunSpec, world: World) -> tuple[nn.Module | None, str]:
    """The network on the meta device, or None with the reason against it."""
    from multigpu_cli.models.on_meta import build_on_meta, find_unsaved_tensors  # late: only sharded runs need it

    seed_weights(spec.config.reproducibility.seed)  # so that only what the factory draws moves the generator
    model, reason = build_on_meta(lambda: init_model(spec.config, spec.source, reference=spec.has_reference))
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
    match = load_initial_weights(model, Path(str(config.init_from)), partial=config.init_partial, skips=REFERENCE)
    set_reference(model)
    return match


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
