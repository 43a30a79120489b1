"""Running means and deviations over all environments of all workers, added in a fixed order."""

import torch
from torch import Tensor


class RunningMoments:
    """Count, mean and squared deviations of k quantities, by Chan's parallel update (Chan et al. 1979).

    Attributes:
        state: (1 + 2k,) float64 on the CPU: count, means, sums of squared deviations.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.state = torch.zeros(1 + 2 * size, dtype=torch.float64)

    def add(self, parts: Tensor) -> None:
        """Add results of `sum_moments`, (parts, 1 + 2k), row by row."""
        for count, mean, squares in (row.split([1, self.size, self.size]) for row in parts.cpu()):
            before, old_mean, old_squares = self.state.split([1, self.size, self.size])
            if not count:
                continue
            whole, away = before + count, mean - old_mean
            self.state = torch.cat(
                [
                    whole,
                    old_mean + away * count / whole,
                    old_squares + squares + away.square() * before * count / whole,
                ]
            )

    @property
    def mean(self) -> Tensor:
        """(k,)"""
        return self.state[1 : 1 + self.size]

    @property
    def deviation(self) -> Tensor:
        """(k,): 1 without data, or where all values are equal."""
        variance = self.state[1 + self.size :] / self.state[0].clamp(min=1)
        return torch.where(variance > 1e-12, variance, 1.0).sqrt()


def sum_moments(values: Tensor) -> Tensor:
    """(1 + 2k,) float64: count, mean and squared deviations of (n, k)."""
    wide = values.double()
    mean = wide.mean(0)
    count = torch.full((1,), len(wide), dtype=torch.float64, device=values.device)
    return torch.cat([count, mean, (wide - mean).square().sum(0)])
