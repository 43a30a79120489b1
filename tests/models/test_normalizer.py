"""Observations as they are, until there are statistics."""

import torch

from multigpu_cli.models.networks.mlp import Normalizer


def test_it_changes_nothing_before_it_has_statistics_and_keeps_them_with_the_weights() -> None:
    normalizer = Normalizer((2,))
    far = torch.tensor([[1e6, -3.0]])
    assert torch.equal(normalizer(far), far)
    normalizer.adopt(torch.tensor([1.0, -1.0]).double(), torch.tensor([2.0, 4.0]).double())
    assert normalizer(far).tolist() == [[10.0, -0.5]]
    other = Normalizer((2,))
    other.load_state_dict(normalizer.state_dict())
    assert other(far).tolist() == [[10.0, -0.5]]
