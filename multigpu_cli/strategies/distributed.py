"""DistributedDataParallel: one process per device, gradients averaged while backward is still running."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from multigpu_cli.config.schema import CommunicationConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks
from multigpu_cli.runtime.world import World
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.strategies.comm_wait import CommWait
from multigpu_cli.strategies.powersgd import PowerSGD

_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
_BUFFERS_BY_DDP: str = (  # renamed in torch 2.13
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class Replica(nn.Module):
    """The module that DDP wraps: the model, or a loss of zero for a worker without a micro-batch in this step.

    With find_unused_parameters an idle worker must not seem to use the model's parameters. DDP needs at least one, so
    an extra parameter serves idle workers only; no optimizer has it.
    """

    def __init__(self, model: nn.Module, *, finds_unused: bool) -> None:
        super().__init__()
        self.model, self._finds_unused = model, finds_unused
        self.idle = False
        self._in_idle = [p for p in model.parameters() if p.requires_grad]
        if finds_unused:
            self._of_nobody = nn.Parameter(torch.zeros_like(self._in_idle[0].flatten()[:1]))
            self._in_idle = [self._of_nobody]

    def forward(self, *inputs: object, **named: object) -> Any:
        if self.idle:
            return torch.stack([p.sum() * 0 for p in self._in_idle]).sum()
        outputs: Any = self.model(*inputs, **named)
        if self._finds_unused and not any(isinstance(each, Tensor) for each in _find_tensors(outputs)):
            raise RequestError(
                f"--find-unused-parameters: DDP finds no tensor in the {type(outputs).__name__} that the model returns",
                remedy="a tensor, tuple, dict or dataclass in its place; or leave the flag out",
            )
        return outputs


class Distributed(Strategy):
    """DDP over the process group.

    DDP divides by the number of workers; losses here are sums divided by the global count, so they are multiplied by it
    again. Buffers are not broadcast: `StepBuffers` keeps them the same.

    Args:
        more: further arguments of torch's DistributedDataParallel.
    """

    name = "ddp"

    def __init__(
        self, model: nn.Module, world: World, config: CommunicationConfig, more: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(model, world)
        self.loss_factor = float(world.size)
        self.reduces_first = bool((more or {}).get("static_graph"))  # the warm-up fixes which parameters are used
        self._replica = Replica(model, finds_unused=config.find_unused_parameters and not self.reduces_first)
        self._ddp = DistributedDataParallel(
            self._replica,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            **{_BUFFERS_BY_DDP: False},  # type: ignore[arg-type]
            find_unused_parameters=config.find_unused_parameters,
            **{"gradient_as_bucket_view": True} | dict(more or {}),
            bucket_cap_mb=None if config.bucket_cap_mb == "auto" else float(config.bucket_cap_mb),
        )
        self._lays_out_first = world.size > 2 or self.reduces_first
        self._low_rank = PowerSGD(self._ddp) if config.grad_compression == "powersgd" else None
        if hook := _HOOKS.get(config.grad_compression):
            self._ddp.register_comm_hook(None, hook)
        self.callable = self._ddp
        self._wait = CommWait((p for p in model.parameters() if p.requires_grad), world.device)

    def warm_up(self, loss: Callable[[], Tensor]) -> None:
        """Let DDP fix the layout of its buckets.

        After its first backward pass DDP assigns the gradients to buckets again. With more than two workers the order
        of summation depends on a gradient's place in its bucket, so without this a resumed run would take its first
        step with other bits than an uninterrupted one. With static_graph DDP learns the graph in that pass, and fails
        or hangs if another pass comes first.
        """
        if not self._lays_out_first:
            return
        (run_on_all_ranks(self._world, loss) * 0).backward()
        self._ddp.zero_grad(set_to_none=True)

    def rollback_buffers(self, skipped: Tensor) -> None:
        super().rollback_buffers(skipped)
        if self._low_rank:
            self._low_rank.rollback(skipped)

    def accumulate(self, *, last: bool) -> AbstractContextManager[object]:
        return self._wait if last else self._ddp.no_sync()

    def reduce_gradients(self, *, idle: bool) -> None:
        if idle:
            self._replica.idle = True
            with self._wait:  # on CUDA, DDP moves inputs to the device, and fails without an input
                self._ddp(None).backward()
            self._replica.idle = False
        super().reduce_gradients(idle=idle)

    def read_comm_wait(self) -> float | None:
        return self._wait.read()

    def close(self) -> None:
        """DDP lies in a cycle of references: without this its hooks and buckets would stay."""
        self._wait.close()
        del self._ddp.reducer
        self._ddp.logger = None  # it holds the reducer too
