"""Random numbers for augmentation: a function of (seed, epoch, sample index) only, drawn for whole batches at once.

A sample is therefore augmented in the same way on any worker or device, in any batch and any order of batches.
"""

from functools import lru_cache

import torch
from torch import Tensor

from multigpu_cli.planning.rng_keys import make_key


def _to_signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_GAMMA, _MIX1, _MIX2 = (_to_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix_bits(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 (for one number: planning/rng_keys.py); the masks make the shifts logical."""
    x = x + _GAMMA
    x.bitwise_xor_((x >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(_MIX1)
    x.bitwise_xor_((x >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(_MIX2)
    return x.bitwise_xor_((x >> 31).bitwise_and_(0x1FFFFFFFF))


@lru_cache
def _stream_keys(streams: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """(columns,) int64 below 2³²: the keys of the streams' columns; cached, since every batch needs them."""
    return torch.cat([torch.arange(count, device=device) + (stream << 20) for stream, count in streams])


class KeyedRandom:
    """The random numbers of one batch of samples.

    Args:
        seed: the run's seed.
        epoch: which pass over the data, from 0.
        indices: (n,) int64, the samples' indices in their dataset, on the device of the numbers.
    """

    def __init__(self, seed: int, epoch: int, indices: Tensor) -> None:
        self._key, self._counters = make_key(seed, epoch), indices[:, None] << 32

    def uniform(self, stream: int, count: int = 1) -> Tensor:
        """(n, count) float32 in [0, 1); each use in an augmentation needs its own stream number."""
        return self.uniform_streams((stream, count))

    def uniform_streams(self, *streams: tuple[int, int]) -> Tensor:
        """(n, columns): the numbers of several (stream, count), concatenated."""
        bits = _mix_bits((self._counters + _stream_keys(streams, self._counters.device)).bitwise_xor_(self._key))
        return bits.bitwise_and_(0xFFFFFF).float().div_(1 << 24)
