"""Shards a model block by block, while one rank sends its weights: no other ever holds more than one block whole.

The others' model may lie on the meta device.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from multigpu_cli.runtime.collectives import broadcast_object
from multigpu_cli.runtime.world import World


def create_mesh(world: World, shard_size: int | None) -> DeviceMesh:
    """All workers in one group; or in groups of `shard_size` workers with successive ranks, which replicate each other.

    Each of these has all rows, and a worker has the same rows as those at the same place in other groups.
    """
    kind = world.device.type
    everyone = cast(dist.ProcessGroup, dist.group.WORLD)
    if shard_size is None or shard_size == world.size:
        return DeviceMesh.from_group(everyone, kind)
    ranks, timeout = torch.arange(world.size).view(-1, shard_size), _read_timeout(everyone, world.device)
    shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
    names = ("replicate", "shard")
    return DeviceMesh.from_group([replicate, shard], kind, mesh=ranks, mesh_dim_names=names)


def _read_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    backend: Any = group._get_backend(device)
    return backend.options._timeout if hasattr(backend, "options") else None


class ModelSharder:
    """Gives each rank its rows of a model, and of a copy of it, and all buffers.

    Args:
        model: whole on the rank `source`.
        average: a copy of it, which gets the same values; None: there is none.
        source: None: no rank has values, and a state will be loaded.
    """

    def __init__(self, model: nn.Module, average: nn.Module | None, world: World, source: int | None) -> None:
        self._models = [model, *([average] if average else [])]
        self._world, self._source = world, source
        self._places: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in [module for each in self._models for module in each.modules()]:
            for name, parameter in module.named_parameters(recurse=False):
                self._places[id(parameter)].append((module, name))
        self._received: set[int] = set()

    def shard(self, mesh: DeviceMesh, blocks: Sequence[str], *, frees_after_forward: bool) -> None:
        """Shard in place: each block by itself, inner ones first, and the rest of the model.

        Args:
            frees_after_forward: else gathered weights are kept until after backward, as those in no block always are:
                its backward pass begins where forward ended; a copy's are always freed, since it has no backward pass.
        """
        for name in [*blocks, ""]:
            parts = [model.get_submodule(name) for model in self._models]
            received = [parameter for part in parts for parameter in part.parameters() if not _is_sharded(parameter)]
            self._receive_parameters(*parts)
            self._receive_buffers(*parts)
            for number, part in enumerate(parts):
                frees = number > 0 or (frees_after_forward and name != "")
                fully_shard(part, mesh=mesh, reshard_after_forward=frees)
            for parameter in received:  # somebody may hold it still, such as an optimizer
                parameter.data = parameter.new_empty(0)
        self._receive_extra_state()
        for module in [module for model in self._models for module in model.modules()]:
            if isinstance(module, FSDPModule):  # neither setting reaches the modules inside
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _receive_parameters(self, *parts: nn.Module) -> None:
        for same in list(zip(*(part.parameters() for part in parts), strict=True)):
            if not _is_sharded(same[0]):
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
        """What modules tell beside tensors."""
        default = nn.Module.get_extra_state
        names = [name for name, part in self._models[0].named_modules() if type(part).get_extra_state is not default]
        if not names or self._source is None:
            return
        own = [self._models[0].get_submodule(name).get_extra_state() for name in names]
        for name, value in zip(names, broadcast_object(self._world, own, source=self._source), strict=True):
            for model in self._models:
                model.get_submodule(name).set_extra_state(value)


def _is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor)
