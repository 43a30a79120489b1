"""Made-up samples of any shape and class count, for benchmarks and trials; learnable, so accuracy means something.

Each class has a coarse random pattern. A sample is its class's pattern with as much coarse noise as `difficulty` says,
stretched to the full shape, with fine noise on top; stored as bytes, as images are.
"""

from collections.abc import Sequence
from math import prod, sqrt

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.data.base import Source
from multigpu_cli.data.channels import met_shape, standardised
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.keys import key

_COARSE = 4  # patterns have at most so many cells along each axis
_DISTANCE = 6.0  # of two classes, in deviations of the coarse noise along the line between them, at difficulty 1
_CHUNK = 4096  # samples made at once, to bound the memory for floats
_PATTERNS, _TRAIN, _VAL, _TEST = range(4)  # one random stream each


def load(
    mode: str,
    seed: int,
    shape: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    train: int = 10_000,
    val: int = 1_000,
    test: int = 1_000,
    difficulty: float = 1.0,
) -> Source:
    """Make the samples, by seed.

    Args:
        shape: of one sample, channels first; (20,) makes vectors.
        train, val, test: how many samples; 0 leaves out the validation or test part.
        difficulty: 0 is trivial, at 1 the best possible classifier is right about 99 % of the time, at 2 about 70 %.

    Raises:
        RequestError: sizes that make no dataset.
    """
    _check(shape, classes, train, val, test, difficulty)
    met = met_shape(shape, mode)
    cells = [min(_COARSE, size) for size in shape]
    patterns = torch.randn(classes, *cells, generator=_generator(seed, _PATTERNS))
    noise = difficulty * sqrt(2 * prod(cells)) / _DISTANCE
    parts = [
        _part(size, patterns, noise, shape, _generator(seed, stream)) if size else None
        for size, stream in ((train, _TRAIN), (val, _VAL), (test, _TEST))
    ]
    assert parts[0] is not None
    return Source(
        train=parts[0],
        val=parts[1],
        test=parts[2],
        input_shape=met,
        num_classes=classes,
        class_names=tuple(f"class {number}" for number in range(classes)),
        prepare=standardised(parts[0].tensors[0], mode),
        model="convnet" if len(met) == 3 and min(met[1:]) >= 4 else "mlp",
    )


def _part(
    count: int, patterns: Tensor, noise: float, shape: Sequence[int], generator: torch.Generator
) -> TensorDataset:
    """`count` samples whose classes are as even as can be, in random order."""
    targets = torch.randperm(count, generator=generator) % len(patterns)
    chunks = [_samples(patterns[some], noise, shape, generator) for some in targets.split(_CHUNK)]
    return TensorDataset(torch.cat(chunks), targets)


def _samples(patterns: Tensor, noise: float, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """(n, *shape) bytes from the classes' patterns (n, *cells)."""
    samples = patterns + noise * torch.randn(patterns.shape, generator=generator)
    for axis, size in enumerate(shape, start=1):  # stretch: cell i covers the i-th share of the axis
        samples = samples.index_select(axis, torch.arange(size) * samples.shape[axis] // size)
    samples = samples + 0.5 * torch.randn(samples.shape, generator=generator)
    spread = sqrt(1 + noise**2 + 0.25)
    return (128 + 40 * samples / spread).round().clamp(0, 255).to(torch.uint8)


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(key(seed, stream))


def _check(shape: Sequence[int], classes: int, train: int, val: int, test: int, difficulty: float) -> None:
    rules = [
        ("shape", shape, len(shape) > 0 and all(isinstance(size, int) and size > 0 for size in shape), "[3, 32, 32]"),
        ("classes", classes, classes >= 2, "at least 2"),
        ("train", train, train >= classes, "at least one sample a class"),
        ("val", val, val >= 0, "0 or more"),
        ("test", test, test >= 0, "0 or more"),
        ("difficulty", difficulty, difficulty >= 0, "0 or more"),
    ]
    for name, value, holds, right in rules:
        if not holds:
            raise RequestError(f"data.args.{name}: {value!r} makes no dataset", remedy=right)
