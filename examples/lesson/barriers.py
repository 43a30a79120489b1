"""What a barrier waits for: torchrun --standalone --nproc_per_node=2 examples/lesson/barriers.py"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

LATE = 0.3


def main(rank: int, size: int) -> None:
    dist.barrier()
    if rank == 1:
        time.sleep(LATE)
    began = time.perf_counter()
    dist.all_reduce(torch.zeros(1))
    waited = time.perf_counter() - began
    if rank == 0:
        print(f"rank 1 comes {LATE} s late; rank 0's all-reduce of one number took that long: {waited > 0.9 * LATE}")
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=1))  # rank 1 does not call it
        except RuntimeError as error:
            print("a barrier on rank 0 alone:", str(error).partition(":")[2].partition("\n")[0].strip())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
