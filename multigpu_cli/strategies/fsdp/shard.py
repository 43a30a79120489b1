"""Builds a network without memory for its weights, and shards it block by block, while one rank sends its weights.

No other ever holds more than one block whole, and its model may lie on the meta device. A network may be larger than a
device: before it is sharded it is on none, and rank 0 has the weights in host memory.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from multigpu_cli.checkpoint.initial_weights import WeightMatch
from multigpu_cli.checkpoint.weights import check_extra_state
from multigpu_cli.config.schema import Config
from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.world import (
    World,
    all_gather_object,
    broadcast_object,
    keep_freed_memory,
    run_on_all_ranks,
)
from multigpu_cli.errors import RequestError
from multigpu_cli.models.blocks import find_blocks_to_wrap
from multigpu_cli.models.build import (
    build_on_meta,
    copy_to_meta,
    find_unsaved_tensors,
    has_2d_convolutions,
    use_channels_last,
)
from multigpu_cli.optimizers.eval_weights import EMAModel
from multigpu_cli.run.assembly import assemble
from multigpu_cli.run.assembly.assemble import BuiltModel, ModelFactory
from multigpu_cli.runtime.precision import Precision, agree_on_precision
from multigpu_cli.runtime.seeding import seed_weights

_CPU = torch.device("cpu")


def build_model_to_shard(factory: ModelFactory) -> BuiltModel:
    """The network on the meta device, where possible: but on rank 0 with the weights of the seed, in host memory.

    Where a checkpoint has all weights, no rank needs others; that of an adapter has what learns. With --exact kernels
    are laid out as without sharding, since the last bits depend on it: rank 0 tries how. Else rows are gathered as they
    lie. RequestError, on every rank: it can't be built, or does not fit the weights, or ranks built different ones.
    """
    world, config = factory.world, factory.spec.config
    keep_freed_memory(below=4 * 2**20)
    model, weights, whole_because, channels_last = run_on_all_ranks(world, lambda: _build(factory))
    if config.reproducibility.exact and broadcast_object(world, channels_last):
        use_channels_last(model)
    source, words = agree_on_source(world, model, whole_because)
    ema, compiles = config.optimizer.ema, config.model.compile != "off"
    average = None if ema == "off" else EMAModel(copy_to_meta(model), float(ema))
    gathered = find_blocks_to_wrap(model, config.device.wrap) or [""] if compiles else []
    blocks = [model.get_submodule(name) for name in gathered]
    return BuiltModel(model, None, weights, average, blocks, source, words)


def _build(factory: ModelFactory) -> tuple[nn.Module, WeightMatch | None, str, bool]:
    """The network of this rank, what --init-from loaded, why all weights are in memory ("" where not), the layout."""
    spec, world, task, first_batch = factory
    model, reason = None, spec.factories.whole_because or "it sends the weights"
    if not spec.factories.whole_because and (spec.resume_point.checkpoint or not world.is_main):
        model, reason = _build_without_weights(factory)
    if model is not None:
        return model.train(), None, "", False
    model = assemble.create_model(spec).train()
    weights, last = assemble.load_weights_to_send(spec, world, model), False
    on_host = partial(Precision, spec.plan.precision, _CPU)
    if any(map(is_lazy, model.parameters())):  # the first pass creates them
        batch = _move_to_host(first_batch())
        seed_weights(spec.config.reproducibility.seed, late=True)
        assemble.smoke_test_batch(spec, task, model, on_host(), batch)
    if _keeps_layout(factory):
        last = assemble.try_channels_last(spec, task, model, on_host(), _move_to_host(first_batch())) is not None
    check_extra_state(model, spec.model)
    return model, weights, reason, last


def _build_without_weights(factory: ModelFactory) -> tuple[nn.Module | None, str]:
    """The network on the meta device, or None with the reason against it."""
    spec = factory.spec
    seed_weights(spec.config.reproducibility.seed)  # so that only what the factory draws moves the generator
    model, reason = build_on_meta(lambda: assemble.create_model(spec))
    if model is not None and _keeps_layout(factory) and has_2d_convolutions(model):
        return None, "the layout of its kernels is tried on it"
    if model is not None and factory.world.is_main and (unsaved := find_unsaved_tensors(model)):
        return None, f"no checkpoint has {unsaved[0]}"
    return model, reason


def _keeps_layout(factory: ModelFactory) -> bool:
    return factory.world.is_main and factory.spec.config.reproducibility.exact


def _move_to_host(batch: Batch) -> Batch:
    inputs, targets = tree_map_only(Tensor, lambda tensor: tensor.to(_CPU), (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets)


def agree_on_source(world: World, model: nn.Module, whole_because: str) -> tuple[int | None, str]:
    """Agree on who has the first weights; all ranks call it together.

    Returns the rank that sends them, None where a checkpoint has them all, and the explanation for the plan.
    RequestError, the same on every rank: they built different networks.
    """
    everyone = all_gather_object(world, [_fingerprint_structure(model), whole_because])
    differing = [rank for rank, (structure, _) in enumerate(everyone) if structure != everyone[0][0]]
    if differing:
        remedy = "a factory that builds the same network on the meta device and wherever it is called"
        raise RequestError(f"--model: rank {differing[0]} built other parameters or buffers than rank 0", remedy=remedy)
    reasons = [reason for _, reason in everyone]
    if not any(reasons):
        return None, "no rank builds the weights: the checkpoint has them"
    if reason := next(filter(None, reasons[1:]), ""):
        return 0, f"each rank builds the whole model in host memory: {reason}"
    return 0, "rank 0 builds the weights in host memory, and each rank gets its rows"


def _fingerprint_structure(model: nn.Module) -> str:
    """A checksum over the names, shapes and formats of parameters and buffers."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    lines = [f"{name} {tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in tensors]
    return sha256("\n".join(lines).encode()).hexdigest()


def create_mesh(world: World, shard_size: int | None) -> DeviceMesh:
    """All workers in one group; or in groups of `shard_size` workers with successive ranks, which replicate each other.

    Each of these has all rows, and a worker has the same rows as those at the same place in other groups.
    """
    kind = world.device.type
    everyone = cast(dist.ProcessGroup, dist.group.WORLD)
    if shard_size is None or shard_size == world.size:
        return DeviceMesh.from_group(everyone, kind)
    ranks, backend = torch.arange(world.size).view(-1, shard_size), cast(Any, everyone._get_backend(world.device))
    timeout: timedelta | None = backend.options._timeout if hasattr(backend, "options") else None
    shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
    names = ("replicate", "shard")
    return DeviceMesh.from_group([replicate, shard], kind, mesh=ranks, mesh_dim_names=names)


def choose_param_dtype(model: nn.Module, config: Config, world: World) -> str:
    """Choose bf16 where autocast would use most weights in it anyway, else fp32; all ranks call it together.

    Autocast keeps its copies of weights until the backward pass. BatchNorm and InstanceNorm may need 32-bit weights.
    """
    precision = agree_on_precision(config.precision.amp, world, [world.device]).name
    normed = any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())
    whole = {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    fits = whole and not normed and world.device.type == "cuda" and not config.reproducibility.exact
    return "bf16" if fits and precision == "bf16" else "fp32"


class ModelSharder:
    """Gives each rank its rows of a model, of its average if there is one, which gets the same values, and all buffers.

    They are those of the rank `source`; None: no rank has values, and a state will be loaded.
    """

    def __init__(self, model: nn.Module, average: nn.Module | None, world: World, source: int | None) -> None:
        self._models = [model, *([average] if average else [])]
        self._world, self._source = world, source
        self._places: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in [module for each in self._models for module in each.modules()]:
            for name, parameter in module.named_parameters(recurse=False):
                self._places[id(parameter)].append((module, name))
        self._received: set[int] = set()

    def shard(
        self, mesh: DeviceMesh, blocks: Sequence[str], *, frees_after_forward: bool, param_dtype: torch.dtype | None
    ) -> None:
        """Shard in place: each block by itself, inner ones first, and the rest of the model.

        Unless a pass `frees_after_forward`, gathered weights are kept until after backward, as those in no block always
        are: its backward pass begins where forward ended. A copy's are always freed, since it has no backward pass.
        With `param_dtype` weights are gathered in it, and gradients reduced in float32; embeddings return float32, so
        that what layers add to is as precise as without it.
        """
        policy = MixedPrecisionPolicy()
        if param_dtype:
            policy = MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
            for module in [module for model in self._models for module in model.modules()]:
                if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                    module.register_forward_hook(lambda *passed: passed[-1].float())
        for name in [*blocks, ""]:
            parts = [model.get_submodule(name) for model in self._models]
            received = [p for part in parts for p in part.parameters() if not isinstance(p, DTensor)]
            self._receive_parameters(*parts)
            self._receive_buffers(*parts)
            for number, part in enumerate(parts):
                frees = number > 0 or (frees_after_forward and name != "")
                fully_shard(part, mesh=mesh, reshard_after_forward=frees, mp_policy=policy)
            for parameter in received:  # somebody may hold it still, such as an optimizer
                parameter.data = parameter.new_empty(0)
        self._receive_extra_state()
        for module in [module for model in self._models for module in model.modules()]:
            if isinstance(module, FSDPModule):  # neither setting reaches the modules inside
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _receive_parameters(self, *parts: nn.Module) -> None:
        for same in list(zip(*(part.parameters() for part in parts), strict=True)):
            if not isinstance(same[0], DTensor):
                whole = self._receive(same[0])
                for parameter in same:
                    self._set_parameter(parameter, whole)

    def _receive_buffers(self, *parts: nn.Module) -> None:
        for same in list(zip(*(part.buffers() for part in parts), strict=True)):
            if id(same[0]) not in self._received:
                whole = self._receive(same[0])
                values = [whole, *(whole.clone() for _ in same[1:])]
                for buffer, value in zip(same, values, strict=True):  # modules may keep it under another name too
                    if buffer.is_meta:
                        torch.utils.swap_tensors(buffer, value)
                    else:
                        buffer.data = value
                self._received.add(id(same[0]))

    def _receive(self, tensor: Tensor) -> Tensor:
        """The source's values as a contiguous tensor on the device: its rows are cut along the first dim."""
        if tensor.is_meta:
            whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._world.device)
        else:
            whole = tensor.detach().to(self._world.device).contiguous()
        if self._source is not None and self._world.size > 1:
            dist.broadcast(whole.flatten().view(torch.uint8), src=self._source)
        return whole

    def _set_parameter(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Give a parameter its values; one on the meta device is replaced wherever the model has it."""
        if not parameter.is_meta:
            parameter.data = whole
            return
        new = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for module, name in self._places[id(parameter)]:
            setattr(module, name, new)

    def _receive_extra_state(self) -> None:
        """Give all ranks what modules of the source tell beside tensors (`get_extra_state`)."""
        default = nn.Module.get_extra_state
        names = [name for name, part in self._models[0].named_modules() if type(part).get_extra_state is not default]
        if not names or self._source is None:
            return
        own = [self._models[0].get_submodule(name).get_extra_state() for name in names]
        for name, value in zip(names, broadcast_object(self._world, own, source=self._source), strict=True):
            for model in self._models:
                model.get_submodule(name).set_extra_state(value)
