"""What DDP does to gradients: torchrun --standalone --nproc_per_node=2 examples/lesson/gradients.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 16


def data() -> tuple[Tensor, Tensor]:
    """The same 16 samples on every rank; the second half has larger targets."""
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=drawn)
    return inputs, inputs.sum(1, keepdim=True) + torch.arange(SAMPLES).view(-1, 1) // 8


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 1)


def gradient(model: nn.Module, inputs: Tensor, targets: Tensor, weight: float = 1.0) -> Tensor:
    """Of `weight` times the mean loss, all parameters in one vector."""
    model.zero_grad()
    (mse_loss(model(inputs), targets) * weight).backward()
    return torch.cat(
        [parameter.grad.flatten().clone() for parameter in model.parameters() if parameter.grad is not None]
    )


def difference(one: Tensor, other: Tensor) -> str:
    """Relative to the larger of the two, in words where only rounding is left."""
    relative = float((one - other).norm() / max(one.norm(), other.norm()))
    return "rounding" if relative < 1e-5 else f"{relative:.0%}"


def main(rank: int, size: int) -> None:
    inputs, targets = data()
    whole = gradient(network(), inputs, targets)
    share = inputs.chunk(size)[rank], targets.chunk(size)[rank]
    own = gradient(network(), *share)
    replica = DistributedDataParallel(network())
    reduced = gradient(replica, *share)
    shares = [SAMPLES * 3 // 4, SAMPLES // 4]  # 12 samples for rank 0, 4 for rank 1
    uneven = gradient(replica, *(part.split(shares)[rank] for part in (inputs, targets)))
    if rank == 0:
        print("one rank's own gradient against that of all 16 samples:", difference(own, whole))
        print("after DDP's all-reduce, 8 samples on each rank:", difference(reduced, whole))
        print("after DDP's all-reduce, 12 samples and 4:", difference(uneven, whole))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
