"""Random state as a function of (seed, step, micro-batch)."""

import random

import numpy
import torch

from multigpu_cli.planning.rng_keys import make_key

_INIT = 0x1417  # keeps the random stream of the initial weights apart from the others


def seed_everything(number: int) -> None:
    """Seed Python, NumPy and torch on every device."""
    seed_host(number)
    torch.manual_seed(number)


def seed_host(number: int) -> None:
    """Seed Python, NumPy and torch on the CPU: 10 µs, while `torch.manual_seed` alone takes longer."""
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)


def seed_weights(seed: int, *, late: bool = False) -> None:
    """Seed all generators for building the model, alike on every rank.

    Args:
        late: for weights that are made at the first forward pass, by which time fetching data has drawn numbers.
    """
    seed_everything(make_key(seed, _INIT, 1) if late else make_key(seed, _INIT))


def seed_micro_batch(seed: int, step: int, index: int, *devices: torch.device) -> None:
    """Seed all generators for one forward pass: what a model draws is then the same on whatever worker it runs.

    Of torch's only those of the CPU and of these devices: `torch.manual_seed` costs ten times as much. Of several that
    share the pass (DataParallel), each draws numbers of its own.
    """
    number = make_key(seed, step, index)
    seed_host(number)
    for lane, device in enumerate(devices):
        if device.type == "cuda":
            own = make_key(seed, step, index, lane) if lane else number
            torch.cuda.default_generators[device.index or 0].manual_seed(own)
