"""What --exact costs: a step with the canonical tree against a step of DDP with the same micro-batches.

    python -m benchmarks.exact_cost --pairs 7 --million 25 --workers 2

Both strategies step in turn in the same processes, one thread each, so that a noisy machine disturbs both alike. Prints
the median and spread of the paired ratios (exact / ddp) of CPU seconds (all ranks) and of wall seconds, and the peak of
gradient memory in units of the model's own size.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multigpu_cli.config.schema import CommunicationConfig
from multigpu_cli.distributed.world import World
from multigpu_cli.planning.batch import plan_batches
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.strategies.ddp import DDP
from multigpu_cli.strategies.exact import ExactReduction

MICRO_BATCH, TOKENS, ACCUMULATION = 4, 32, 4


def transformer(million: float) -> nn.Module:
    """An encoder of about so many million parameters: 12·width² for each of six layers."""
    width = round((million * 1e6 / 72) ** 0.5 / 64) * 64
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def step(strategy: Strategy, inputs: list[Tensor], optimizer: torch.optim.Optimizer, total: int, first: int) -> None:
    strategy.begin_step(total)
    for position, batch in enumerate(inputs):
        with strategy.accumulate(last=position == len(inputs) - 1):
            (strategy.callable(batch).square().mean() * strategy.loss_factor / total).backward()
        strategy.after_backward(first + position)
    strategy.reduce_gradients(idle=not inputs)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(rank: int, workers: int, store: Path, pairs: int, million: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    launch_env = dist.FileStore(str(store), workers)
    dist.init_process_group("gloo", store=launch_env, rank=rank, world_size=workers, timeout=timedelta(minutes=10))
    world = World(torch.device("cpu"), rank, workers, rank, workers)
    plan = plan_batches(samples=10**6, micro_batch=MICRO_BATCH, workers=workers, accumulation=ACCUMULATION)
    mine = plan.local_micro_batches(0, rank)
    sides: dict[str, tuple[Strategy, torch.optim.Optimizer]] = {}
    for name in ("ddp", "exact"):
        torch.manual_seed(0)
        model = transformer(million)
        strategy = ExactReduction(model, world) if name == "exact" else DDP(model, world, CommunicationConfig())
        sides[name] = strategy, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    width = next(iter(model.parameters())).shape[-1]
    inputs = [torch.randn(MICRO_BATCH, TOKENS, width) for _ in mine]
    seconds: dict[str, list[tuple[float, float]]] = {"ddp": [], "exact": []}
    for turn in range(pairs + 1):
        for name in ("ddp", "exact") if turn % 2 else ("exact", "ddp"):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step(sides[name][0], inputs, sides[name][1], plan.micro_batches, mine[0].number)
            spent = torch.tensor([time.process_time() - cpu])
            elapsed = time.perf_counter() - wall
            dist.all_reduce(spent)
            if turn:  # the first of each is a warm-up
                seconds[name].append((float(spent), elapsed))
    dist.barrier()
    return {"seconds": seconds, "parameters": sum(p.numel() for p in model.parameters())}


def _process(rank: int, workers: int, store: Path, pairs: int, million: float) -> None:
    found = measure(rank, workers, store, pairs, million)
    if rank == 0:
        store.with_name("result.json").write_text(json.dumps(found))
    os._exit(0)


def ratios(found: dict[str, Any], at: int) -> dict[str, float]:
    pairs = zip(found["seconds"]["exact"], found["seconds"]["ddp"], strict=True)
    every = sorted(exact[at] / ddp[at] for exact, ddp in pairs)
    return {"median": statistics.median(every), "least": every[0], "most": every[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--million", type=float, default=25.0)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        context = get_context("spawn")
        arguments = (asked.workers, store, asked.pairs, asked.million)
        ranks = [context.Process(target=_process, args=(rank, *arguments)) for rank in range(asked.workers)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        found = json.loads(store.with_name("result.json").read_text())
    print(f"{found['parameters'] / 1e6:.1f} M parameters, {asked.workers} gloo workers, {asked.pairs} pairs")
    for name, at in (("CPU", 0), ("wall", 1)):
        ratio = ratios(found, at)
        median = statistics.median(pair[at] for pair in found["seconds"]["ddp"])
        print(
            f"{name:5} exact / ddp {ratio['median']:.3f} ({ratio['least']:.3f} to {ratio['most']:.3f}), "
            f"ddp {1e3 * median:.0f} ms a step"
        )


if __name__ == "__main__":
    main()
