"""A plain multi-layer perceptron, and the layer that normalizes a table's columns."""

from math import prod

import torch
from torch import Tensor, nn


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


_FARTHEST = 10.0  # deviations; values beyond are clipped


class Normalizer(nn.Module):
    """Returns observations of a shape unchanged until statistics are set; then scales and clips them."""

    mean: Tensor
    deviation: Tensor
    farthest: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("deviation", torch.ones(shape))
        self.register_buffer("farthest", torch.tensor(torch.finfo(torch.float32).max))

    def forward(self, observations: Tensor) -> Tensor:
        away = (observations - self.mean) / self.deviation
        return away.clamp(-self.farthest, self.farthest)

    @torch.no_grad()
    def adopt(self, mean: Tensor, deviation: Tensor) -> None:
        """Set the statistics, one number per element of an observation."""
        self.mean.copy_(mean.view_as(self.mean))
        self.deviation.copy_(deviation.view_as(self.deviation))
        self.farthest.fill_(_FARTHEST)
