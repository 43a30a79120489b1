"""Shards a model block by block, while one rank sends its weights: no other ever holds more than one block whole.

The others' model may lie on the meta device.
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from multigpu_cli.distributed.collectives import broadcast_object
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError


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


_ROWS, _STEPS = 6, 3


def check_is_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Try the optimizer on a small weight, whole and in two pieces, with the settings of each of its groups.

    Raises:
        RequestError: the results differ: it needs whole weights, as Muon, LAMB and Adafactor do.
    """
    for group in filter(lambda each: each["params"], optimizer.param_groups):
        shape = (_ROWS, 4) if any(parameter.ndim > 1 for parameter in group["params"]) else (_ROWS,)
        like: Tensor = group["params"][0]
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator).to(like.device, like.dtype) for _ in range(1 + _STEPS)]
        whole = _optimize(optimizer, group, drawn)
        pieces = [_optimize(optimizer, group, list(part)) for part in zip(*(d.chunk(2) for d in drawn), strict=True)]
        if not torch.allclose(torch.cat(pieces), whole, rtol=1e-3, atol=1e-5):
            raise RequestError(
                f"--multi-gpu fsdp: each worker has only some rows of a weight, and {type(optimizer).__name__} needs "
                "all of them: its step on two pieces is another than on the whole",
                remedy="an optimizer that treats each number by itself, such as AdamW or SGD, or --multi-gpu ddp",
            )


def _optimize(optimizer: torch.optim.Optimizer, group: dict[str, Any], drawn: list[Tensor]) -> Tensor:
    """A weight after some steps of a copy of the optimizer.

    Args:
        drawn: the weight and its gradients.
    """
    weight = torch.nn.Parameter(drawn[0].clone())
    trial = copy(optimizer)
    trial.state = defaultdict(dict)
    if initial := _resize_state(optimizer.state.get(group["params"][0], {}), group["params"][0], weight):
        trial.state[weight] = initial
    trial.param_groups = [group | {"params": [weight], "lr": 0.01}]
    for gradient in drawn[1:]:
        weight.grad = gradient.clone()
        type(optimizer).step(trial)  # not `trial.step`, which a scheduler may have replaced by one for the original
    return weight.detach()


def _resize_state(state: dict[str, Any], parameter: Tensor, weight: Tensor) -> dict[str, Any]:
    """What an optimizer has put into the state of a parameter already, as Adagrad's constructor does, for the weight.

    Tensors of the parameter's shape are filled with their first number.

    Returns:
        {} if there are other tensors, as Adafactor has after its first step: the optimizer makes them anew.
    """
    resized = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            resized[key] = value
        elif value.ndim == 0:
            resized[key] = value.clone()
        elif value.shape == parameter.shape:
            first = value.flatten()[0].item() if value.numel() else 0  # a worker may have no row of a short weight
            resized[key] = torch.full_like(weight, first, dtype=value.dtype)
        else:
            return {}
    return resized
