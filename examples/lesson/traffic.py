"""What travels in a step of DDP and of DP: torchrun --standalone --nproc_per_node=2 examples/lesson/traffic.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

MIB = 2**20


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))


def reduce_all() -> list[float]:
    """MiB of each message of one step of DDP, in the order in which backward makes them ready."""
    messages = []

    def note(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        messages.append(bucket.buffer().nbytes / MIB)
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # the default group

    model = DistributedDataParallel(network(), bucket_cap_mb=2)
    model.register_comm_hook(None, note)
    for _ in range(2):  # DDP arranges its buckets anew after the first step
        messages.clear()
        model(torch.ones(4, 512)).sum().backward()
    return messages


def main(rank: int, size: int) -> None:
    messages = reduce_all()
    weights = sum(parameter.nbytes for parameter in network().parameters()) / MIB
    if rank == 0:
        print(f"a network of {weights:.0f} MiB: DDP reduces {sum(messages):.0f} MiB a step in {len(messages)} messages")
        for gpus in (2, 4, 8):
            ring, star = 2 * (gpus - 1) / gpus * weights, 2 * (gpus - 1) * weights
            print(f"{gpus} GPUs: with DDP each sends {ring:.0f} MiB a step; with DP {star:.0f} MiB pass through GPU 0")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
