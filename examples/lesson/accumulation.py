"""Accumulation with and without no_sync: torchrun --standalone --nproc_per_node=2 examples/lesson/accumulation.py"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = 8, 4


class Counter:
    """Counts the reductions of a DDP model; a comm hook sees each bucket of gradients."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.reductions = 0
        model.register_comm_hook(None, self.reduce)

    def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.reductions += 1
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # the default group


def micro_batches(rank: int, count: int = STEPS) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 8, generator=drawn) for _ in range(count)]


def accumulate(rank: int, *, synchronise_all: bool) -> tuple[int, torch.Tensor]:
    """Reductions, and the gradient of the last window of four micro-batches."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    counter = Counter(model)
    for number, batch in enumerate(micro_batches(rank), start=1):
        last = number % EVERY == 0
        with nullcontext() if last or synchronise_all else model.no_sync():
            (model(batch).square().mean() / EVERY).backward()
        gradient = torch.cat(
            [parameter.grad.flatten().clone() for parameter in model.parameters() if parameter.grad is not None]
        )
        if last:
            model.zero_grad()
    return counter.reductions, gradient


def windows(steps_at: list[int]) -> list[int]:
    """How many micro-batches each optimizer step had, if it was taken after these (counted from 0)."""
    return [at - before for before, at in zip([-1, *steps_at], steps_at, strict=False)]


def main(rank: int, size: int) -> None:
    often, expected = accumulate(rank, synchronise_all=True)
    once, gradient = accumulate(rank, synchronise_all=False)
    if rank == 0:
        print(f"reductions for {STEPS} micro-batches in windows of {EVERY}: {often}, with no_sync {once}")
        print("the same gradient:", torch.allclose(gradient, expected))
        print("step where (i + 1) % 4 == 0:", windows([i for i in range(STEPS) if (i + 1) % EVERY == 0]))
        print("step where i % 4 == 0:", windows([i for i in range(STEPS) if i % EVERY == 0]), "and 3 are left over")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
