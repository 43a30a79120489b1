"""fp16 and loss scaling: torchrun --standalone --nproc_per_node=2 examples/lesson/mixed_precision.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCALE = 2.0**16


def step(rank: int, factor: float) -> tuple[bool, float, bool]:
    """One scaled step of DDP in which rank 1 has the loss times `factor`.

    Returns:
        Whether this rank's weights moved, the scale after it, and whether rank 0's weights are this rank's.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    before = model.module.weight.detach().clone()
    loss = model(torch.ones(2, 4)).square().mean() * (factor if rank else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # before clipping: a norm of scaled gradients means nothing
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    weights = model.module.weight.detach().clone()
    first = weights.clone()
    dist.broadcast(first, src=0)
    return not torch.equal(weights, before), scaler.get_scale(), torch.equal(first, weights)


def main(rank: int, size: int) -> None:
    small = torch.tensor(1e-8)
    fine, overflow = step(rank, 1.0), step(rank, float("inf"))
    answers: list[tuple[object, ...] | None] = [None] * size
    dist.all_gather_object(answers, (fine, overflow))
    if rank == 0:
        print("a gradient of 1e-8 in fp16:", small.half().item())
        print("the same times 65536, divided after:", f"{((small * SCALE).half().float() / SCALE).item():.0e}")
        for name, results in zip(("both ranks fine", "overflow on rank 1"), zip(*answers, strict=True), strict=True):
            for number, (moved, scale, alike) in enumerate(results):
                print(f"{name}: rank {number} moved: {moved}, scale {scale:.0f}, weights as on rank 0: {alike}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
