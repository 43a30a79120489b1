"""Seeds as a function of (seed, epoch, sample) or (seed, step, micro-batch), independent of ranks and workers."""

_MASK = (1 << 64) - 1


def mix_bits(number: int) -> int:
    """Mix 64 bits (SplitMix64's finalizer; Steele, Lea and Flood 2014), so that close numbers give unrelated ones."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def make_key(*parts: int) -> int:
    """One 63-bit seed from several numbers; their order matters, so (1, 2) and (2, 1) give different seeds."""
    state = 0
    for part in parts:
        state = mix_bits(state ^ mix_bits(part & _MASK))
    return state >> 1
