"""Actions within bounds."""

import torch

from multigpu_cli.environments.base import Box


def test_actions_are_brought_within_bounds_for_all_elements_or_one_by_one() -> None:
    wild = torch.tensor([[-5.0, 0.5], [3.0, 9.0]])
    assert Box((2,), -1.0, 1.0).clip(wild).tolist() == [[-1.0, 0.5], [1.0, 1.0]]
    assert Box((2,), (-4.0, 0.0), (0.0, float("inf"))).clip(wild).tolist() == [[-4.0, 0.5], [0.0, 9.0]]
    assert Box((1, 2), (-4.0, 0.0), 1.0).clip(wild[:, None]).shape == (2, 1, 2)
