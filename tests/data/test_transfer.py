"""What can be seen without a GPU; tests/gpu/check.py compares the bits of a dataset on the GPU and beside it."""

from typing import Any, NamedTuple

import torch

from multigpu_cli.data.collate import Fetched, move_batches


class Pair(NamedTuple):
    first: torch.Tensor
    second: str


def test_tensors_move_wherever_they_are_and_the_rest_stays() -> None:
    inputs: dict[str, Any] = {"a": torch.ones(2), "b": [torch.zeros(1), ("x", 3)], "c": Pair(torch.ones(1), "y")}
    batches = [Fetched(inputs, torch.arange(2) + first, torch.arange(2) + first) for first in (0, 2)]
    found = list(move_batches(batches, torch.device("meta")))
    assert [batch[2].tolist() for batch in found] == [[0, 1], [2, 3]]
    assert all(batch[2].device.type == "cpu" for batch in found), "which samples they are is for the host"
    there = found[0][0]
    assert there["a"].is_meta
    assert there["b"][0].is_meta
    assert there["b"][1] == ("x", 3)
    assert there["c"].first.is_meta
    assert there["c"].second == "y"
    assert found[1][1].is_meta
