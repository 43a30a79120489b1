"""Synthetic samples of any shape and number of classes, for benchmarks and trials; a model can learn the classes.

Each class has a coarse random pattern. A sample is the pattern of its class plus noise (`difficulty`), stretched to the
full shape and stored as bytes, as images are.
"""

from collections.abc import Sequence
from math import prod, sqrt
from typing import Annotated

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.config.types import integer, number
from multigpu_cli.data.source import DataSource
from multigpu_cli.data.transforms import fit_standardised, model_input_shape
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import make_key

_COARSE = 4  # cells of a pattern along each axis, at most
_DISTANCE = 6.0  # between two classes, in standard deviations of the noise, at difficulty 1
_PATTERNS, _TRAIN, _VAL, _TEST = range(4)  # one random stream each


def load(
    mode: str,
    seed: int,
    shape: Sequence[int] = (3, 32, 32),
    classes: Annotated[int, integer(2)] = 10,
    train: Annotated[int, integer(1)] = 10_000,
    val: Annotated[int, integer(0)] = 1_000,
    test: Annotated[int, integer(0)] = 1_000,
    difficulty: Annotated[float, number(0)] = 1.0,
) -> DataSource:
    """Generate the samples from the seed.

    Args:
        shape: of one sample, channels first; (20,) gives vectors.
        train, val, test: number of samples; 0 leaves out the validation or test split.
        difficulty: 0 is trivial; for ten classes of images the best possible accuracy is 98 % at 1, 85 % at 1.5 and 69
            % at 2.
    """
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        raise RequestError(f"data.args.shape: {shape!r} is out of range", remedy="use [3, 32, 32]")
    if train < classes:
        raise RequestError(f"data.args.train: {train} is out of range", remedy="use at least one sample per class")
    input_shape = model_input_shape(shape, mode)
    cells = [min(_COARSE, size) for size in shape]
    patterns = torch.randn(classes, *cells, generator=_generator(seed, _PATTERNS))
    noise = difficulty * sqrt(2 * prod(cells)) / _DISTANCE
    parts = [
        _part(size, patterns, noise, shape, _generator(seed, stream)) if size else None
        for size, stream in ((train, _TRAIN), (val, _VAL), (test, _TEST))
    ]
    assert parts[0] is not None
    return DataSource(
        train=parts[0],
        val=parts[1],
        test=parts[2],
        input_shape=input_shape,
        num_classes=classes,
        class_names=tuple(f"class {number}" for number in range(classes)),
        prepare=fit_standardised(parts[0].tensors[0], mode),
        model="convnet" if len(input_shape) == 3 and min(input_shape[1:]) >= 4 else "mlp",
    )


def _part(
    count: int, patterns: Tensor, noise: float, shape: Sequence[int], generator: torch.Generator
) -> TensorDataset:
    """Samples (count, *shape) of bytes from patterns (classes, *cells); balanced classes in random order."""
    targets = torch.randperm(count, generator=generator) % len(patterns)
    coarse = patterns[targets] + noise * torch.randn(count, *patterns.shape[1:], generator=generator)
    samples = (128 + 40 * coarse / sqrt(1 + noise**2)).round().clamp(0, 255).to(torch.uint8)
    for axis, size in enumerate(shape, start=1):  # stretch: cell i covers the i-th share of the axis
        samples = samples.index_select(axis, torch.arange(size) * samples.shape[axis] // size)
    return TensorDataset(samples, targets)


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(make_key(seed, stream))
