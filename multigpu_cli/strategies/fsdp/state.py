"""A state whose weights are divided over the processes, and its whole form, which is that of any other strategy.

Both ways go tensor by tensor, so that no process holds more than one whole tensor on its device.
"""

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from multigpu_cli.distributed.collectives import broadcast_object
from multigpu_cli.distributed.world import World
from multigpu_cli.runtime.module_state import TensorPath, map_tensors, name_tensor
from multigpu_cli.strategies.base import ReadRows


class ShardedState:
    """Gathers and scatters the states of a model, its optimizer and its average.

    Args:
        parameters: the model's, by every name that it has.
        mesh: of the workers that share the rows, and perhaps, before that, of their replicas.

    Attributes:
        moved: those of the optimizer, by their number in its state.
        replicas: workers that hold the same rows.
    """

    def __init__(self, world: World, parameters: Mapping[str, DTensor], mesh: DeviceMesh) -> None:
        self._world, self._parameters = world, parameters
        self._shard, self._num_shards = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self.replicas = world.size // self._num_shards
        self._is_first = mesh.ndim == 1 or mesh.get_local_rank(0) == 0  # of the workers that hold the same rows
        self.moved: Mapping[int, DTensor] = {}

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """Whole tensors in host memory, on rank 0; {} on the others."""
        whole: dict[str, Any] = map_tensors(state, self._gather)
        return whole if self._world.is_main else {}

    def scatter(self, state: dict[str, Any] | None, source: int) -> dict[str, Any]:
        """This rank's part of the source's state: DTensors of model and average, and plain rows of the optimizer."""
        outline = None
        if self._world.rank == source:  # tensors of the same shape and dtype that take one element of memory
            outline = map_tensors(state, lambda _, value: value.new_zeros(()).expand(value.shape))
        outline = broadcast_object(self._world, outline, source=source)
        return dict(map_tensors(outline, lambda path, tensor: self._receive(path, tensor, state, source)))

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Tensor, int]]]:
        """See `Strategy.sharded_state_dict`."""
        own: dict[str, tuple[Tensor, int]] = {}

        def outline(path: TensorPath, value: Tensor) -> Tensor:
            like = self._find_parameter(path, value)
            if like is None:
                return value
            rows = value.to_local() if isinstance(value, DTensor) else value
            if self._is_first:
                own[name_tensor(path)] = rows.detach(), self._find_rows(like)[0]
            return torch.empty(like.shape, dtype=value.dtype, device="meta")

        return map_tensors(state, outline), own

    def read(self, outline: dict[str, Any], read: ReadRows) -> dict[str, Any]:
        """See `Strategy.load_sharded`."""

        def fill(path: TensorPath, value: Tensor) -> Tensor:
            if not value.is_meta:
                return value
            like = self._find_parameter(path, value)
            if like is None or like.shape != value.shape:  # of another model: whoever loads it says so
                return read(name_tensor(path), value)
            rows = read(name_tensor(path), value, *self._find_rows(like)).to(self._world.device)
            return rows if path[0] == "optimizer" else _as_dtensor(rows, like)

        return dict(map_tensors(outline, fill))

    def _find_rows(self, whole: Tensor) -> tuple[int, int]:
        """The first of this rank's rows, and the one after its last, as `fully_shard` divides them."""
        length = -(-whole.shape[0] // self._num_shards)
        begin = min(length * self._shard, whole.shape[0])
        return begin, min(begin + length, whole.shape[0])

    def take_rows(self, whole: Tensor) -> Tensor:
        """A copy of this rank's rows."""
        begin, end = self._find_rows(whole)
        return whole[begin:end].clone(memory_format=torch.contiguous_format)  # fused kernels ignore strides

    def _gather(self, path: TensorPath, value: Tensor) -> Tensor | None:
        like = self._find_parameter(path, value)
        if like is not None and not isinstance(value, DTensor):
            value = _as_dtensor(value, like)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.detach().to("cpu", copy=True) if self._world.is_main else None

    def _receive(self, path: TensorPath, outline: Tensor, state: dict[str, Any] | None, source: int) -> Tensor:
        whole = torch.empty(outline.shape, dtype=outline.dtype, device=self._world.device)
        if self._world.rank == source:
            whole.copy_(reduce(getitem, path, state))  # type: ignore[arg-type]
        dist.broadcast(whole.flatten().view(torch.uint8), src=source)
        like = self._find_parameter(path, whole)
        if like is None or like.shape != whole.shape:  # of another model: whoever loads it says so
            return whole.cpu()
        rows = self.take_rows(whole)
        return rows if path[0] == "optimizer" else _as_dtensor(rows, like)

    def _find_parameter(self, path: TensorPath, value: Tensor) -> DTensor | None:
        """The parameter that a tensor is divided like; None for one that every rank has whole, such as a buffer."""
        if path[0] == "optimizer":
            return self.moved.get(path[2]) if path[1] == "state" and value.ndim else None
        if path[0] in ("model", "average"):
            return self._parameters.get(str(path[1]).removeprefix("module." if path[0] == "average" else ""))
        return None


def _as_dtensor(rows: Tensor, like: DTensor) -> DTensor:
    """Rows of this rank as a part of a tensor of the parameter's shape."""
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
