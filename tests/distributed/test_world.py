import torch

from multigpu_cli.distributed.world import World


def test_rank_0_is_the_one_that_speaks() -> None:
    cpu = torch.device("cpu")
    assert World(cpu).is_main
    assert not World(cpu, rank=1, size=2).is_main
