"""Show what broadcast, all-reduce, gather and barrier do.

torchrun --standalone --nproc_per_node=2 examples/lesson/collectives.py
"""

import torch
import torch.distributed as dist


def main(rank: int, size: int) -> None:
    sent = torch.tensor([1.0, 2.0]) if rank == 0 else torch.zeros(2)
    dist.broadcast(sent, src=0)  # every rank now has rank 0's values

    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)  # every rank now has the sum over all ranks

    collected = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank), sent.sum().item()]), collected, dst=0)  # only rank 0 receives

    dist.barrier()  # nobody passes before all have arrived
    if rank == 0:
        print("broadcast from rank 0: rank 1 has the sum", collected[1][1].item() if collected else None)
        print("all-reduce of rank + 1:", total.item())
        print("gather on rank 0, from ranks", [int(values[0]) for values in collected or []])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
