"""Each node has its own copy of the data; one whose copy differs is named."""

from dataclasses import replace

import torch
from torch.utils.data import TensorDataset

from multigpu_cli.data.base import Source
from multigpu_cli.data.mark import mark_of
from multigpu_cli.errors import RequestError
from multigpu_cli.run.alike import check_same_data
from multigpu_cli.runtime.world import World
from tests.gloo import each_rank


def source(size: int = 30, shift: float = 0.0) -> Source:
    inputs = torch.arange(3.0 * size).view(size, 3)
    inputs[7] += shift
    return Source(
        train=TensorDataset(inputs, torch.arange(size) % 2), val=None, test=None, input_shape=(3,), num_classes=2
    )


def said(world: World, hosts: tuple[str, ...], data: list[Source]) -> str:
    try:
        mine = data[world.rank]
        check_same_data(replace(world, hosts=hosts), mine, mark_of(mine, 42), "mine")
    except RequestError as error:
        return error.problem if error.shared else "several ranks speak"
    return ""


def test_the_node_that_differs_is_named() -> None:
    two = ("node1", "node1", "node2")

    def work(world: World) -> list[str]:
        return [
            said(world, two, [source()] * 3),
            said(world, two, [source(), source(), source(shift=1)]),
            said(world, two, [source(), source(size=31), source(size=31)]),
            said(world, two, [source(), source(shift=1), source()]),
            said(world, ("here",) * 3, [source(), source(), source(size=29)]),
        ]

    told = each_rank(3, work)
    assert told[0] == told[1] == told[2], "the same error on every rank"
    assert told[0][0] == ""
    assert "--data mine: node2 (rank 2) and the others see different data: other contents" in told[0][1]
    assert told[0][2].startswith("--data mine: rank 0 and the others see different data: 30 training samples instead")
    assert "rank 1 and the others" in told[0][3], "not its whole node"
    assert "rank 2 and the others see different data: 29 training samples instead of 30" in told[0][4]
