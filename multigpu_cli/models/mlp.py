"""A plain multi-layer perceptron."""

from math import prod

from torch import nn


def build(
    input_shape: tuple[int, ...], num_classes: int, width: int = 256, depth: int = 2, dropout: float = 0.1
) -> nn.Module:
    """`depth` hidden layers of `width` units with ReLU and dropout; inputs (n, *input_shape) are flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    features = prod(input_shape)
    for _ in range(depth):
        layers += [nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout)]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, num_classes))
