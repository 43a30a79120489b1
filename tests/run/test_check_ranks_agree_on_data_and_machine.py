"""Each node has its own copy of the data; one whose copy differs is named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from multigpu_cli.data.fingerprint import compute_fingerprint
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.run.request import prepare, spec
from multigpu_cli.run.request.checks import check_same_data, check_same_machine
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import run_training


def source(size: int = 30, shift: float = 0.0, val: int = 8) -> DataSource:
    inputs = torch.arange(3.0 * size).view(size, 3)
    inputs[7] += shift
    train = TensorDataset(inputs, torch.arange(size) % 2)
    return DataSource(train=train, val=Subset(train, range(val)), input_shape=(3,), num_classes=2)


def read_refusal(world: World, hosts: tuple[str, ...], data: list[DataSource]) -> str:
    try:
        mine = data[world.rank]
        check_same_data(replace(world, hosts=hosts), mine, compute_fingerprint(mine, 42), "mine")
    except RequestError as error:
        return error.problem if error.shared else "several ranks speak"
    return ""


def test_the_node_that_differs_is_named() -> None:
    two = ("node1", "node1", "node2")

    def work(world: World) -> list[str]:
        return [
            read_refusal(world, two, [source()] * 3),
            read_refusal(world, two, [source(), source(), source(shift=1)]),
            read_refusal(world, two, [source(), source(size=31), source(size=31)]),
            read_refusal(world, two, [source(), source(shift=1), source()]),
            read_refusal(world, ("here",) * 3, [source(), source(), source(size=29)]),
            read_refusal(world, two, [source(), source(), source(val=7)]),
        ]

    told = run_on_each_rank(3, work)
    assert told[0] == told[1] == told[2], "the same error on every rank"
    assert told[0][0] == ""
    assert "--data mine: node2 (rank 2) and the others see different data: other contents" in told[0][1]
    assert told[0][2].startswith("--data mine: rank 0 and the others see different data: 30 training samples instead")
    assert "rank 1 and the others" in told[0][3], "not its whole node"
    assert "rank 2 and the others see different data: 29 training samples instead of 30" in told[0][4]
    assert told[0][5].endswith("30, 7 and 0 samples to train, validate and test on instead of 30, 8 and 0")


def test_exact_needs_gpus_of_one_kind() -> None:
    """On a resume each rank compares with the checkpoint; at the start only the ranks have each other."""

    def work(world: World) -> list[str]:
        told = []
        for devices in (["A100"] * 3, ["A100", "T4", "A100"], ["T4", "A100", "A100"]):
            try:
                check_same_machine(world, {"CPU threads": 1, "device": devices[world.rank]})
                told.append("")
            except RequestError as error:
                told.append(error.problem if error.shared else "several ranks speak")
        return told

    told = run_on_each_rank(3, work)
    assert told[0] == told[1] == told[2], "the same error on every rank"
    assert told[0] == [
        "",
        "--exact: rank 1 would train with device T4, rank 0 with A100: bits would differ",
        "--exact: ranks 1, 2 would train with device A100, rank 0 with T4: bits would differ",
    ]


def test_exact_refuses_ranks_whose_arithmetic_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_checksums(device: torch.device, precision: str) -> dict[str, str]:
        return {"checksum of products": "1f", "checksum of convolutions": ("2f", "9e")[torch.distributed.get_rank()]}

    monkeypatch.setattr(spec, "compute_checksums", compute_checksums)
    ended = run_training(2, save_dir=str(tmp_path / "run"), exact=True, max_steps=2)
    assert (ended.kind, (tmp_path / "run").exists()) == ("RequestError", False)
    assert "--exact: rank 1 would train with checksum of convolutions 9e, rank 0 with 2f" in ended.error


def test_a_run_with_exact_is_not_begun_on_two_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_name_device", lambda world: ("A100", "T4")[world.rank])
    ended = run_training(2, save_dir=str(tmp_path / "run"), exact=True, max_steps=2)
    assert (ended.kind, (tmp_path / "run").exists()) == ("RequestError", False)
    assert "rank 1 would train with device T4" in ended.error
    assert not run_training(2, save_dir=str(tmp_path / "run"), max_steps=2).error, "without --exact they may differ"
