"""DistributedDataParallel: one process per device, gradients averaged while backward is still running."""

import inspect
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from multigpu_cli.config.schema import CommunicationConfig
from multigpu_cli.runtime.world import World
from multigpu_cli.strategies.base import Strategy

_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
_BUFFERS_BY_DDP: str = (  # renamed in torch 2.13
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class Replica(nn.Module):
    """What DDP wraps: the model, or nothing but zeros for a worker that has no micro-batch in this step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.idle = False

    def forward(self, *inputs: object, **named: object) -> Tensor:
        if self.idle:
            return torch.stack([p.flatten()[:1].sum() * 0 for p in self.model.parameters() if p.requires_grad]).sum()
        return self.model(*inputs, **named)  # type: ignore[no-any-return]


class Distributed(Strategy):
    """DDP over the process group.

    DDP divides by the number of workers; losses here are sums divided by the global count, so they are multiplied by it
    again. Buffers are not broadcast: `StepBuffers` keeps them alike.
    """

    name = "ddp"

    def __init__(self, model: nn.Module, world: World, config: CommunicationConfig) -> None:
        super().__init__(model, world.size)
        self.loss_factor = float(world.size)
        self._replica = Replica(model)
        self._ddp = DistributedDataParallel(
            self._replica,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            **{_BUFFERS_BY_DDP: False},  # type: ignore[arg-type]
            gradient_as_bucket_view=True,
            find_unused_parameters=config.find_unused_parameters,
            bucket_cap_mb=None if config.bucket_cap_mb == "auto" else float(config.bucket_cap_mb),
        )
        if hook := _HOOKS.get(config.grad_compression):
            self._ddp.register_comm_hook(None, hook)
        self.callable = self._ddp

    def accumulating(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._ddp.no_sync()

    def finish(self, *, idle: bool) -> None:
        if idle:
            self._replica.idle = True
            self._ddp().backward()
            self._replica.idle = False
        super().finish(idle=idle)

    def _total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values
