"""The gradient noise scale: up to which size a global batch pays, from gradient norms of small and large batches.

McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1. With G the true
gradient and Σ the covariance of single samples' gradients, E|G_B|² = |G|² + tr(Σ)/B. Two batch sizes give both
unknowns, and B_simple = tr(Σ)/|G|² is the batch size at which noise and signal are equal.
"""

import math
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

_REMEMBERED = 200  # estimates


class NoiseScale(NamedTuple):
    """B_simple in samples, with its standard error."""

    value: float
    spread: float


class Norms(NamedTuple):
    """|gradient|² of a small and of a large batch, each a mean over its samples or tokens, and their samples."""

    small: float
    large: float
    small_batch: int
    large_batch: int

    def signal_and_noise(self) -> tuple[float, float]:
        """Unbiased estimates of |G|² and tr(Σ); a single pair may well give negative ones."""
        b, B = self.small_batch, self.large_batch
        return (B * self.large - b * self.small) / (B - b), (self.small - self.large) / (1 / b - 1 / B)


class NoiseMeter:
    """Measures the first micro-batch's gradient in each logged step of several micro-batches.

    Args:
        interval: steps between log lines; 0 never measures.
        factor: by which the loss of a micro-batch was multiplied, apart from the divisor of all losses of a step.
    """

    def __init__(self, interval: int, factor: float = 1.0) -> None:
        self._interval, self._factor = interval, factor
        self._norm: Tensor | None = None
        self._estimates: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def is_due(self, step: int, passes: int, done: int) -> bool:
        """Whether micro-batch `done` of this worker's `passes` in step `step` (counted from 1) is to be measured."""
        return bool(self._interval) and done == 1 and passes > 1 and step % self._interval == 0

    @torch.no_grad()
    def record_gradient(self, gradients: list[Tensor]) -> None:
        """Store the norm of the first micro-batch's gradient; without one the step is not measured."""
        self._norm = torch.nn.utils.get_total_norm(gradients) if gradients else None

    def take_small_norm(self) -> float | None:
        """The norm stored since the last call, without the factor of the losses."""
        norm, self._norm = self._norm, None
        return None if norm is None else float(norm) / self._factor

    def add(self, norms: Norms) -> None:
        """Add the norms of a step; on all ranks, whichever has measured."""
        if math.isfinite(norms.small) and math.isfinite(norms.large):
            self._estimates.append(norms.signal_and_noise())

    def value(self) -> NoiseScale | None:
        """The ratio of the mean estimates; None with too few of them, or where the noise hides the signal."""
        return ratio(list(self._estimates))


def ratio(estimates: list[tuple[float, float]]) -> NoiseScale | None:
    """tr(Σ)/|G|² (at least 0) with its standard error, by linear propagation from the scatter of the estimates."""
    count = len(estimates)
    if count < 5:
        return None
    signal = sum(each[0] for each in estimates) / count
    noise = sum(each[1] for each in estimates) / count
    if signal <= 0:
        return None
    value = max(0.0, noise) / signal
    scatter = sum((tr - value * g) ** 2 for g, tr in estimates) / (count - 1)
    return NoiseScale(value, math.sqrt(scatter / count) / signal)
