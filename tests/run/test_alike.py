"""Each node has its own copy of the data; one whose copy differs is named."""

from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from multigpu_cli.config.sources import resolve
from multigpu_cli.data.base import Source
from multigpu_cli.errors import RequestError
from multigpu_cli.run.alike import check_same_data
from multigpu_cli.run.settle import settle
from multigpu_cli.runtime.devices import Choice
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
        check_same_data(replace(world, hosts=hosts), data[world.rank], "mine", 42)
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


def test_a_run_of_several_workers_looks_before_anything_is_written(tmp_path: Path) -> None:
    def work(world: World) -> str:
        request = resolve({"data": "tests.own:tensors", "save_dir": str(tmp_path / "run")}, [], None)
        choice = Choice("ddp", (world.device,), 0, "a test")
        try:
            settle(request, choice, replace(world, hosts=("a", "b")), source=source(shift=float(world.rank)))
        except RequestError as error:
            return error.problem
        return ""

    for told in each_rank(2, work):
        assert told.startswith("--data tests.own:tensors: b (rank 1) and the others see different data")
    assert not (tmp_path / "run").exists()
