"""An accuracy over two workers: torchrun --standalone --nproc_per_node=2 examples/lesson/metrics.py"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

RIGHT = [True] * 4 + [False] * 3
"""Whether each of seven samples is classified rightly."""


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main(rank: int, size: int) -> None:
    share = torch.tensor([RIGHT[index] for index in range(rank, len(RIGHT), size)], dtype=torch.float64)
    sampler: DistributedSampler[int] = DistributedSampler(range(len(RIGHT)), size, rank, shuffle=False)  # type: ignore[arg-type]
    padded = [RIGHT[index] for index in sampler]
    means, repeated = share.mean(), torch.tensor(mean([float(right) for right in padded]))
    counts = torch.tensor([share.sum(), len(share)])
    for value in (means, repeated, counts):
        dist.all_reduce(value)
    if rank == 0:
        print(f"true accuracy: {mean([float(right) for right in RIGHT]):.4f}")
        print(f"mean of the workers' means: {means / size:.4f}")
        print(f"with DistributedSampler's padding: {repeated / size:.4f}")
        print(f"sum over all, divided by the count: {counts[0] / counts[1]:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
