"""Convolutional networks: of pairs of 3×3 convolutions for images (VGG style), ResNet-18, and in time for UCI HAR.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015; with the batch
normalization of Ioffe and Szegedy 2015 and global pooling (Lin et al. 2014) in place of wide dense layers. He, Zhang,
Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016 (arXiv:1512.03385), table 1.
"""

import torch
from torch import Tensor, nn

from multigpu_cli.errors import RequestError


def _check_images(model: str, input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        problem = f"--model {model} needs images (channels, height, width) of at least 4×4; --data gives {input_shape}"
        raise RequestError(problem, remedy="use --model mlp, which accepts samples of any shape")


class ConvNet(nn.Module):
    """Images (n, C, H, W) of any size from 4×4 to (n, num_classes) logits.

    Stages of two convolutions each, then mean and maximum over the image, then one linear layer. The first stage has
    `width` channels, each later one twice as many. There are `stages` resolutions; fewer if the image is too small to
    be halved that often.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, width: int = 32, stages: int = 3, dropout: float = 0.1
    ) -> None:
        super().__init__()
        _check_images("convnet", input_shape)
        channels, *size = input_shape
        layers: list[nn.Module] = []
        for stage in range(min(stages, min(size).bit_length() - 1)):  # the last resolution keeps at least 2×2 pixels
            if stage:
                layers.append(nn.MaxPool2d(2))
            layers += [*_convolution(channels, width), *_convolution(width, width)]
            channels, width = width, 2 * width
        self.features = nn.Sequential(*layers)
        self.classify = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * channels, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images).flatten(2)
        logits: Tensor = self.classify(torch.cat([features.mean(-1), features.amax(-1)], dim=1))
        return logits


def _convolution(channels: int, width: int, side: int = 3, stride: int = 1) -> list[nn.Module]:
    kernel = nn.Conv2d(channels, width, side, stride, padding=side // 2, bias=False)
    return [kernel, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]


_SHORTEST = 16  # samples of a window, which is halved twice


class HarConvNet(nn.Module):
    """Windows (n, channels, samples) to (n, num_classes) logits; the later stages have twice as many channels.

    Three convolutions with mean and maximum over time, concatenated with each channel's mean and log-deviation.
    Normalized features describe the shape of a movement; the two statistics keep its strength and the direction of
    gravity.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 48, dropout: float = 0.1) -> None:
        super().__init__()
        if len(input_shape) != 2 or input_shape[1] < _SHORTEST:
            raise RequestError(
                f"--model har-convnet needs signals (channels, samples) of at least {_SHORTEST} samples; "
                f"--data gives {input_shape}",
                remedy="use --model mlp for samples of any shape, or --model convnet for images",
            )
        channels = input_shape[0]
        self.features = nn.Sequential(
            *_convolution_har_convnet(channels, width, 9),
            nn.MaxPool1d(2),
            *_convolution_har_convnet(width, 2 * width, 5),
            nn.MaxPool1d(2),
            *_convolution_har_convnet(2 * width, 2 * width, 5),
        )
        self.classify = nn.Sequential(nn.Dropout(dropout), nn.Linear(4 * width + 2 * channels, num_classes))

    def forward(self, signals: Tensor) -> Tensor:
        features = self.features(signals)
        spread = signals.std(-1, correction=0).clamp_min(1e-3).log()
        summary = torch.cat([features.mean(-1), features.amax(-1), signals.mean(-1), spread], dim=1)
        logits: Tensor = self.classify(summary)
        return logits


def _convolution_har_convnet(channels: int, width: int, reach: int) -> list[nn.Module]:
    return [
        nn.Conv1d(channels, width, reach, padding=reach // 2, bias=False),
        nn.GroupNorm(1, width),  # unlike BatchNorm, a sample's features do not depend on its micro-batch
        nn.ReLU(inplace=True),
    ]


_SMALL = 64  # images with a shorter side below this use the stem for small images


def resnet18(input_shape: tuple[int, ...], num_classes: int, width: int = 64) -> nn.Module:
    """Images (n, C, H, W) of 4×4 or more to (n, num_classes) logits; `width` is the first stage's, and doubles."""
    _check_images("resnet18", input_shape)
    return ResNet(input_shape, num_classes, width, blocks=(2, 2, 2, 2))


class ResNet(nn.Module):
    """Stem, four stages of residual blocks, mean over the image, one linear layer.

    The stem for small images is one 3×3 convolution without pooling (§4.2 of the paper). No stage halves an image that
    would become smaller than 2×2: BatchNorm could not learn from a micro-batch of one sample with one pixel.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int, blocks: tuple[int, ...]) -> None:
        super().__init__()
        channels, side = input_shape[0], min(input_shape[1:])
        stem = _convolution(channels, width)
        if side >= _SMALL:
            stem = [*_convolution(channels, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)]
            side = -(-side // 4)
        self.stem = nn.Sequential(*stem)
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            stride = 2 if stage and side >= 3 else 1
            side = -(-side // stride)
            stages += [_Block(channels, width, stride), *(_Block(width, width, 1) for _ in range(count - 1))]
            channels, width = width, 2 * width
        self.stages = nn.Sequential(*stages)
        self.classify = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.stages(self.stem(images))
        logits: Tensor = self.classify(features.mean((2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3×3 convolutions plus a shortcut, which is a 1×1 convolution where the shape changes (option B)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(*_convolution(channels, width, stride=stride), *_convolution(width, width)[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.residual(images) + self.shortcut(images))
