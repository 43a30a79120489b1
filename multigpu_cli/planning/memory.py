"""The device memory of a training, from measured parts, for any micro-batch size."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device.

    Attributes:
        weights, gradients, optimizer: what does not depend on the batch.
        fixed, per_sample: what forward keeps for backward: a part that stays, and one that grows with the micro-batch.
    """

    weights: int
    gradients: int
    optimizer: int
    fixed: float
    per_sample: float

    def activations(self, micro_batch: int) -> float:
        return self.fixed + self.per_sample * micro_batch

    def total_bytes(self, micro_batch: int) -> float:
        """Without the allocator's reserve, the workspace of kernels, and the context of the driver."""
        return self.weights + self.gradients + self.optimizer + self.activations(micro_batch)

    def largest_batch(self, capacity: float) -> int:
        """Samples of the largest micro-batch that fits into so many bytes; 0 where none does."""
        left = capacity - self.total_bytes(0)
        return 0 if left < self.per_sample else int(left // self.per_sample) if self.per_sample else 0


def fit_line(one: tuple[int, float], other: tuple[int, float]) -> tuple[float, float]:
    """Fixed part and slope of what was measured with two batch sizes."""
    slope = (other[1] - one[1]) / (other[0] - one[0])
    return max(0.0, one[1] - slope * one[0]), slope
