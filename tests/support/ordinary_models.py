"""Ordinary networks as people write them, as --model names them: with masks, positions and counters as buffers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class VisionTransformer(nn.Module):
    """Patches of 4 × 4 pixels, with sines as their positions, (1, n, width)."""

    positions: Tensor

    def __init__(self, shape: Sequence[int], classes: int, width: int = 16) -> None:
        super().__init__()
        channels, *pixels = shape
        count = pixels[0] * pixels[1] // 16
        self.patch = nn.Conv2d(channels, width, 4, stride=4)
        sines = torch.zeros(1, count, width)
        angles = torch.arange(count)[:, None] * torch.exp(-torch.arange(0, width, 2) / width)
        sines[0, :, 0::2], sines[0, :, 1::2] = angles.sin(), angles.cos()
        self.register_buffer("positions", sines)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        found = self.patch(images).flatten(2).mT + self.positions
        for layer in self.layers:
            found = layer(found)
        logits: Tensor = self.head(found.mean(1))
        return logits


class Attention(nn.Module):
    """Causal attention by a mask (1, 1, T, T): of what is looked at, or `added` and minus infinity for what is not."""

    mask: Tensor

    def __init__(self, width: int, length: int, *, saved: bool, added: bool) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mask = torch.ones(length, length).tril()
        self.register_buffer("mask", (mask.log() if added else mask.bool()).view(1, 1, length, length), saved)

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.project(inputs).chunk(3, -1))
        mask = self.mask[:, :, :length, :length]
        found: Tensor = self.out(scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2))
        return found


class MaskedGPT(nn.Module):
    """A language model of two blocks with masks, and complex rotations (1, T, width / 2)."""

    rotations: Tensor

    def __init__(self, tokens: int, length: int, width: int = 16, *, saved: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        angles = torch.arange(length)[:, None] * torch.exp(-torch.arange(0, width, 2) / width)
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles)[None])
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), Attention(width, length, saved=saved, added=added), nn.GELU())
            for added in (False, True)
        )
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.embed(tokens).unflatten(-1, (-1, 2)))
        found = torch.view_as_real(pairs * self.rotations[:, : tokens.shape[1]]).flatten(-2)
        for block in self.blocks:
            found = found + block(found)
        logits: Tensor = self.head(found)
        return logits


class UNet(nn.Module):
    """One level down and up again, with BatchNorm's counters () and a kernel (1, 1, 3, 3) that blurs."""

    blur: Tensor

    def __init__(self, channels: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.down, self.inner = self._block(channels, width), self._block(width, 2 * width)
        self.up, self.outer = nn.ConvTranspose2d(2 * width, width, 2, stride=2), self._block(2 * width, width)
        self.register_buffer("blur", torch.full((1, 1, 3, 3), 1 / 9))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(channels: int, width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        kept = self.down(images)
        found = self.up(self.inner(nn.functional.max_pool2d(kept, 2)))
        scores = self.head(self.outer(torch.cat([kept, found], 1)))
        blurred = nn.functional.conv2d(scores.flatten(0, 1)[:, None], self.blur, padding=1)
        return blurred.view_as(scores).mean((2, 3))


class Recurrent(nn.Module):
    """Two layers of LSTM over the rows of an image, whose mean and deviation are buffers (1, 1)."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, columns: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((1, 1), 0.1))
        self.register_buffer("deviation", torch.full((1, 1), 1.3))
        self.lstm, self.head = nn.LSTM(columns, width, 2, batch_first=True), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.lstm((images.flatten(1, 2) - self.mean) / self.deviation)
        logits: Tensor = self.head(states[:, -1])
        return logits


def vit(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    return VisionTransformer(input_shape, num_classes)


def gpt(num_classes: int, *, saved: bool = True) -> nn.Module:
    return MaskedGPT(num_classes, 9, saved=saved)


def sparse(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(num_classes, 4, sparse=True), nn.Linear(4, num_classes))


def unet(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    return UNet(input_shape[0], num_classes)


def lstm(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    return Recurrent(input_shape[-1], num_classes)
