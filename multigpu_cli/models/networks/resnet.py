"""ResNet-18.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016 (arXiv:1512.03385), table 1.
"""

import torch
from torch import Tensor, nn

from multigpu_cli.errors import RequestError

_SMALL = 64  # images with a shorter side below this use the stem for small images


def resnet18(input_shape: tuple[int, ...], num_classes: int, width: int = 64) -> nn.Module:
    """Images (n, C, H, W) of 4×4 or more to (n, num_classes) logits.

    Args:
        width: channels of the first stage; each later stage has twice as many.

    Raises:
        RequestError: the samples are not images, or too small.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise RequestError(
            f"--model resnet18 needs images (channels, height, width) of at least 4×4; --data gives {input_shape}",
            remedy="use --model mlp, which accepts samples of any shape",
        )
    return ResNet(input_shape, num_classes, width, blocks=(2, 2, 2, 2))


class ResNet(nn.Module):
    """Stem, four stages of residual blocks, mean over the image, one linear layer.

    The stem for small images is one 3×3 convolution without pooling (§4.2 of the paper). No stage halves an image that
    would become smaller than 2×2: BatchNorm could not learn from a micro-batch of one sample with one pixel.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int, blocks: tuple[int, ...]) -> None:
        super().__init__()
        channels, side = input_shape[0], min(input_shape[1:])
        self.stem = _small_stem(channels, width) if side < _SMALL else _large_stem(channels, width)
        side = side if side < _SMALL else -(-side // 4)
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
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.residual(images) + self.shortcut(images))


def _small_stem(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))


def _large_stem(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
