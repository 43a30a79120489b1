"""Running statistics over several workers' parts."""

import torch

from multigpu_cli.rl.objective import RunningMoments, sum_moments


def test_moments_are_those_of_everything_at_once_and_an_empty_part_changes_nothing() -> None:
    values = torch.randn(90, 3, dtype=torch.float64) * torch.tensor([1.0, 10.0, 1e-3]) + 5
    moments = RunningMoments(3)
    assert moments.deviation.tolist() == [1, 1, 1]
    moments.add(torch.stack([sum_moments(values[:20]), torch.zeros(7), sum_moments(values[20:50])]))
    moments.add(sum_moments(values[50:])[None])
    torch.testing.assert_close(moments.mean, values.mean(0))
    torch.testing.assert_close(moments.deviation, values.std(0, correction=0))


def test_what_does_not_move_is_not_scaled() -> None:
    moments = RunningMoments(1)
    moments.add(sum_moments(torch.full((9, 1), 4.0))[None])
    assert (float(moments.mean), float(moments.deviation)) == (4.0, 1.0)
