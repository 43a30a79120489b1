"""The groups of workers among which a model is divided."""

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401 - seconds, once rather than in each forked rank

from multigpu_cli.distributed.world import World
from multigpu_cli.strategies.fsdp.shard import create_mesh
from tests.support.ranks import TIMEOUT, run_on_each_rank


def test_every_group_waits_as_long_as_that_of_all_workers() -> None:
    def work(world: World) -> list[bool]:
        mesh = create_mesh(world, 1)
        groups = [dist.group.WORLD, mesh.get_group("replicate"), mesh.get_group("shard")]
        return [group._get_backend(world.device).options._timeout == TIMEOUT for group in groups]  # type: ignore[union-attr]

    assert run_on_each_rank(2, work) == [[True, True, True]] * 2
