"""The device memory of training, from measured parts, for any micro-batch size."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device.

    Attributes:
        weights, gradients, optimizer: the parts that do not depend on the micro-batch.
        fixed, per_sample: activations, which are fixed + per_sample × micro-batch.
        unsharded: whole weights, gathered for a pass, and whole gradients that wait for their reduction, at one time.
        in_turn: the gradients come as the activations go; otherwise both are there at one time.
    """

    weights: int
    gradients: int
    optimizer: int
    fixed: float
    per_sample: float
    unsharded: int = 0
    in_turn: bool = False

    def activations(self, micro_batch: int) -> float:
        return self.fixed + self.per_sample * micro_batch

    def total_bytes(self, micro_batch: int) -> float:
        """All parts, without the allocator's reserve, kernel workspaces and the driver's context."""
        both = (self.gradients, self.activations(micro_batch))
        return self.weights + self.unsharded + self.optimizer + (max(both) if self.in_turn else sum(both))

    def largest_batch(self, capacity: float) -> int:
        """Samples of the largest micro-batch that fits into `capacity` bytes; 0 if none does."""
        left = capacity - self.total_bytes(0)
        if self.in_turn and left >= 0:  # without samples there may be gradients in the place of activations
            left += max(self.gradients, self.fixed) - self.fixed
        return 0 if left < self.per_sample else int(left // self.per_sample) if self.per_sample else 0


def fit_line(one: tuple[int, float], other: tuple[int, float]) -> tuple[float, float]:
    """Intercept and slope of a line through two measurements (batch size, value)."""
    slope = (other[1] - one[1]) / (other[0] - one[0])
    return max(0.0, one[1] - slope * one[0]), slope
