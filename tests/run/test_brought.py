"""All ranks begin with what rank 0 brought."""

from typing import Any

import torch

from multigpu_cli.run.brought import make_alike
from multigpu_cli.runtime.world import World
from tests.awkward import Telling
from tests.gloo import each_rank


def test_every_rank_gets_the_weights_of_rank_0_and_what_they_come_with() -> None:
    def work(world: World) -> Any:
        torch.manual_seed(world.rank)
        model = Telling(3, 2, ["of rank", world.rank])
        make_alike(model, world)
        return [model.kept, model.layer.weight.tolist()]

    first, second = each_rank(2, work)
    assert first == second
    assert first[0] == ["of rank", 0]
