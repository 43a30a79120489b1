"""The device memory of training, from measured parts, for any micro-batch size."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device.

    Attributes:
        weights, gradients, optimizer: the parts that do not depend on the micro-batch.
        fixed, per_sample: activations, which are fixed + per_sample × micro-batch.
    """

    weights: int
    gradients: int
    optimizer: int
    fixed: float
    per_sample: float

    def activations(self, micro_batch: int) -> float:
        return self.fixed + self.per_sample * micro_batch

    def total_bytes(self, micro_batch: int) -> float:
        """All parts, without the allocator's reserve, kernel workspaces and the driver's context."""
        return self.weights + self.gradients + self.optimizer + self.activations(micro_batch)

    def largest_batch(self, capacity: float) -> int:
        """Samples of the largest micro-batch that fits into `capacity` bytes; 0 if none does."""
        left = capacity - self.total_bytes(0)
        return 0 if left < self.per_sample else int(left // self.per_sample) if self.per_sample else 0


def fit_line(one: tuple[int, float], other: tuple[int, float]) -> tuple[float, float]:
    """Intercept and slope of a line through two measurements (batch size, value)."""
    slope = (other[1] - one[1]) / (other[0] - one[0])
    return max(0.0, one[1] - slope * one[0]), slope
