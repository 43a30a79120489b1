"""A model whose state is larger than a simulated GPU: told at the start, with the way out; nothing switches to it.

The passes of FSDP on simulated GPUs are in test_out_of_memory.py.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import nn

from multigpu_cli.distributed.world import World
from multigpu_cli.models.blocks import find_blocks_to_wrap
from multigpu_cli.models.build import build_on_meta
from multigpu_cli.strategies.fsdp.fsdp import FSDP2
from tests.gpu.simulated.gpus import each_rank, front_door, train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import Machine

MIB = 2**20
CARDS = Machine.of(2, memory=48 * MIB)
LARGE: dict[str, Any] = {"model": "tests.gpu.test_too_large:layers", "batch_size": 2, "amp": "off", "max_steps": 2}


def layers(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """16 MiB of weights; with AdamW 64 MiB of state."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(16)))
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 512), blocks, nn.Linear(512, num_classes))


@pytest.mark.parametrize(("workers", "strategy"), [(1, "none"), (2, "auto")])
def test_a_state_that_does_not_fit_names_sharding(workers: int, strategy: str, tmp_path: Path) -> None:
    ended = train_on_gpus(workers, machine=CARDS, save_dir=str(tmp_path / "run"), multi_gpu=strategy, **LARGE)
    assert ended.kind == "RequestError", ended.error
    assert "optimizer state do not fit one GPU of 48.00 MiB" in ended.error
    assert "--multi-gpu fsdp, which divides" in ended.error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_ends_with_2(tmp_path: Path) -> None:
    words = ["--model", LARGE["model"], "--save-dir", str(tmp_path / "run")]
    ended = front_door(*words, machine=CARDS)
    assert ended.returncode == 2, ended.stderr
    assert "--multi-gpu fsdp, which divides" in ended.stderr
    tried = front_door(*words, "--multi-gpu", "fsdp", "--dry-run", machine=CARDS)
    assert tried.returncode == 2, tried.stderr
    assert "torchrun --nproc_per_node=N … --dry-run" in tried.stderr


def test_no_gpu_ever_has_the_whole_of_a_sharded_model() -> None:
    """Each allocates its half, and what of a block was not freed yet."""

    def shard(sim: Simulated, world: World) -> int:
        model = layers((64,), 10) if world.is_main else build_on_meta(lambda: layers((64,), 10))[0]
        assert model is not None
        FSDP2(model, world, blocks=find_blocks_to_wrap(model))
        return torch.cuda.max_memory_allocated(world.device)

    for most in each_rank(2, shard, CARDS):
        assert 8 * MIB < most < 8 * MIB + 4 * MIB
