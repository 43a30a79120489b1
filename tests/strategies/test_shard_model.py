"""The groups of workers among which a model is divided."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.world import World
from multigpu_cli.runtime.precision import PrecisionChoice
from multigpu_cli.strategies.fsdp import shard
from multigpu_cli.strategies.fsdp.shard import choose_param_dtype, create_mesh
from tests.support.ranks import TIMEOUT, run_on_each_rank


def test_every_group_waits_as_long_as_that_of_all_workers() -> None:
    def work(world: World) -> list[bool]:
        mesh = create_mesh(world, 1)
        groups = [dist.group.WORLD, mesh.get_group("replicate"), mesh.get_group("shard")]
        return [group._get_backend(world.device).options._timeout == TIMEOUT for group in groups]  # type: ignore[union-attr]

    assert run_on_each_rank(2, work) == [[True, True, True]] * 2


@pytest.mark.parametrize(
    ("device", "precision", "model", "flags", "expected"),
    [
        ("cuda", "bf16", nn.Linear(2, 2), {}, "bf16"),
        ("cuda", "bf16", nn.Linear(2, 2), {"exact": True}, "fp32"),
        ("cuda", "bf16", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), {}, "fp32"),  # it takes 32 bits only
        ("cuda", "bf16", nn.InstanceNorm2d(2, affine=True), {}, "fp32"),  # and it, for inputs in 32 bits
        ("cuda", "bf16", nn.Linear(2, 2).bfloat16(), {}, "fp32"),  # as they are
        ("cuda", "fp16", nn.Linear(2, 2), {}, "fp32"),
        ("cpu", "bf16", nn.Linear(2, 2), {}, "fp32"),
    ],
)
def test_weights_are_gathered_in_bf16_where_most_are_used_in_it(
    device: str, precision: str, model: nn.Module, flags: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "agree_on_precision", lambda *_: PrecisionChoice(precision, ""))
    assert choose_param_dtype(model, resolve(flags, (), None), World(torch.device(device))) == expected
