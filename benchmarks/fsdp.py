"""FSDP2 on two gloo workers: our step with --multi-gpu fsdp against `fully_shard` by hand.

    python -m benchmarks.fsdp

Both train the same GPT with the same optimizer, clipped, and gather the weights block by block (wall time, the slower
rank's).
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from benchmarks.ddp import WORKERS, late, raced
from benchmarks.paired_timing import STRETCH, Row, Seconds, program
from benchmarks.workloads import LENGTH, MAX_NORM, VOCABULARY, adamw, against, one_step, shuffled, tokens
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.models.networks.gpt import GPT

GLOBAL_BATCH = 16
BLOCKS = 21  # short ones, since two processes that wait for each other are disturbed often


def measure(tiny: bool = False) -> list[Row]:
    found = raced(partial(_run, 4 if tiny else 84), joined=max)
    found.count = BLOCKS
    return [
        found.ratio("FSDP2, GPT: by hand / itself (control)", "control", "raw"),
        found.micro("FSDP2, GPT: a step by hand, fused and clipped (wall)", "raw"),
        found.ratio("FSDP2, GPT: ours at defaults / by hand, both fused and clipped", "ours", "raw", aim=1.10),
    ]


def _run(turns: int, folder: Path) -> Seconds:
    flags = {"data": "benchmarks.workloads:tokens", "multi_gpu": "fsdp", "lr": "1e-3"}
    flags |= {"batch_size": str(GLOBAL_BATCH // WORKERS), "epochs": "1000", "max_steps": str(turns * STRETCH)}
    rivals: dict[str, Callable[[], object]] = {"raw": late(_by_hand), "control": late(_by_hand)}
    return against(rivals, flags, folder / "run", Seconds(time.perf_counter), LaunchEnv.current())


def _by_hand() -> Callable[[], None]:
    model, data = GPT((LENGTH,), VOCABULARY), tokens().train
    assert isinstance(model, GPT)
    assert isinstance(data, TensorDataset)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    batches = ((inputs, targets.flatten()) for inputs, targets in shuffled(data, GLOBAL_BATCH // WORKERS))
    logits = nn.Sequential(model, nn.Flatten(0, 1))  # a row for each token
    return one_step(logits, adamw(model, fused=True), batches, max_norm=MAX_NORM)


if __name__ == "__main__":
    program(measure, __doc__)
