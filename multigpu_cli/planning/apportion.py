"""Divides a number of things by weights into whole numbers."""

from collections.abc import Sequence


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that sum up to `total` and are as near to the weights' shares as that allows (largest remainders).

    Args:
        weights: positive; their sum need not be 1.
    """
    whole = sum(weights)
    shares = [total * weight / whole for weight in weights]
    counts = [int(share) for share in shares]
    first = sorted(range(len(weights)), key=lambda at: (counts[at] - shares[at], at))
    for at in first[: total - sum(counts)]:
        counts[at] += 1
    return counts
