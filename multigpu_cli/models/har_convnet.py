"""A one-dimensional convolutional network for windows of sensor signals, as in human activity recognition."""

import torch
from torch import Tensor, nn

from multigpu_cli.errors import RequestError

_SHORTEST = 16  # samples of a window, which is halved twice


def build(input_shape: tuple[int, ...], num_classes: int, width: int = 48, dropout: float = 0.1) -> nn.Module:
    """Windows (n, channels, samples) to (n, num_classes) logits.

    Args:
        width: channels of the first stage; the second and third have twice as many.

    Raises:
        RequestError: the samples are not signals, or too short.
    """
    if len(input_shape) != 2 or input_shape[1] < _SHORTEST:
        raise RequestError(
            f"--model har-convnet needs signals (channels, samples) of at least {_SHORTEST} samples; "
            f"--data gives {input_shape}",
            remedy="use --model mlp for samples of any shape, or --model convnet for images",
        )
    return HarConvNet(input_shape[0], num_classes, width, dropout)


class HarConvNet(nn.Module):
    """Three convolutions with mean and maximum over time, concatenated with each channel's mean and log-deviation.

    Normalized features describe the shape of a movement; the two statistics keep its strength and the direction of
    gravity.
    """

    def __init__(self, channels: int, num_classes: int, width: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(channels, width, 9),
            nn.MaxPool1d(2),
            *_convolution(width, 2 * width, 5),
            nn.MaxPool1d(2),
            *_convolution(2 * width, 2 * width, 5),
        )
        self.classify = nn.Sequential(nn.Dropout(dropout), nn.Linear(4 * width + 2 * channels, num_classes))

    def forward(self, signals: Tensor) -> Tensor:
        features = self.features(signals)
        spread = signals.std(-1, correction=0).clamp_min(1e-3).log()
        summary = torch.cat([features.mean(-1), features.amax(-1), signals.mean(-1), spread], dim=1)
        logits: Tensor = self.classify(summary)
        return logits


def _convolution(channels: int, width: int, reach: int) -> list[nn.Module]:
    return [
        nn.Conv1d(channels, width, reach, padding=reach // 2, bias=False),
        nn.GroupNorm(1, width),  # unlike BatchNorm, a sample's features do not depend on its micro-batch
        nn.ReLU(inplace=True),
    ]
