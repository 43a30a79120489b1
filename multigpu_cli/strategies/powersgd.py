"""PowerSGD: a gradient matrix is sent as the product of two thin ones; the error is added to the next step's gradient.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019; torch's hook does it.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

_RANK = 4
_PLAIN_STEPS = 100  # the first gradients change fast and are sent whole (§4.3: not in the paper, torch advises it)
_TINY = 1e-8  # keeps a gradient of zeros from being divided by its norm


class PowerSGD:
    """The hook and its error memory, which is local to this process and empty after a restart."""

    def __init__(self, ddp: DistributedDataParallel, *, plain_steps: int = _PLAIN_STEPS) -> None:
        self._state = PowerSGDState(
            None, matrix_approximation_rank=_RANK, start_powerSGD_iter=plain_steps, orthogonalization_epsilon=_TINY
        )
        in_turn = dist.get_backend(ddp.process_group) == "gloo"
        ddp.register_comm_hook(self._state, _one_by_one if in_turn else powerSGD_hook)

    @torch.no_grad()
    def rollback(self, skipped: Tensor) -> None:
        """Remove a skipped step from the error memory: its NaN would be added to every later step; no host sync."""
        for residual in self._state.error_dict.values():
            residual.masked_fill_(skipped.bool(), 0.0)
        for factor in self._state.q_memory_dict.values():
            spread = torch.arange(factor.numel(), device=factor.device, dtype=factor.dtype).add_(1).sin_()
            factor.copy_(torch.where(skipped.bool(), spread.view_as(factor), factor))


def _one_by_one(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce one bucket at a time: torch's hook waits for its second reduction on one of gloo's two threads.

    With two buckets at once both threads would wait, and none would reduce.
    """
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future
