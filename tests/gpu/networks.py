"""Networks and data of the checks' own, as --model and --data name them."""

import os
import signal
import time
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures of ten classes that can be told apart, each made when it is fetched."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        target = index % 10
        picture = torch.randn(1, 8, 8, generator=generator)
        picture[0, target // 2 : target // 2 + 2, 4 * (target % 2) : 4 * (target % 2) + 4] += 2
        return picture, target


def pictures(split: str, seed: int) -> Pictures:
    """A map-style dataset, so that loader processes fetch it."""
    return Pictures({"train": 1600, "val": 200, "test": 400}[split], seed + len(split))


def tokens(split: str, seed: int, vocabulary: int = 64, length: int = 128) -> TensorDataset | None:
    """Sequences in which each token is the one before it plus one: soon learned."""
    if split == "test":
        return None
    generator = torch.Generator().manual_seed(seed + len(split))
    starts = torch.randint(0, vocabulary, ({"train": 512, "val": 32}[split], 1), generator=generator)
    drawn = (starts + torch.arange(length + 1)) % vocabulary
    return TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """The same sequences, cut to 65 to 128 tokens; each batch is filled up to its longest."""

    num_classes = 64

    def __init__(self, sequences: TensorDataset) -> None:
        self._inputs, self._targets = sequences.tensors

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = 65 + index * 37 % 64
        return self._inputs[index, :length], self._targets[index, :length]

    def collate_fn(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = ([sample[side] for sample in samples] for side in (0, 1))
        return pad_sequence(inputs, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=-100)


def texts(split: str, seed: int) -> Texts | None:
    sequences = tokens(split, seed)
    return None if sequences is None else Texts(sequences)


def checkpointed(input_shape: tuple[int, ...], num_classes: int, norm: type[nn.Module] = nn.LayerNorm) -> nn.Module:
    """Blocks that --grad-checkpointing runs twice."""
    blocks = [nn.Sequential(nn.Linear(256, 256), norm(256), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 256), *blocks, nn.Linear(256, num_classes))


def checkpointed_with_batchnorm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return checkpointed(input_shape, num_classes, nn.BatchNorm1d)


class Wide(nn.Module):
    """Few weights, and megabytes of activations for each sample."""

    def __init__(self, features: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.enter, self.leave, self.depth = nn.Linear(features, width), nn.Linear(width, num_classes), depth

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.enter(inputs.flatten(1))
        for _ in range(self.depth):
            x = torch.sin(x)
        out: Tensor = self.leave(x)
        return out


def wide(input_shape: Sequence[int], num_classes: int, width: int = 65536, depth: int = 16) -> nn.Module:
    return Wide(prod(input_shape), num_classes, width, depth)


class AtPass(nn.Module):
    """One layer, with a deed at some training pass."""

    def __init__(self, features: int, num_classes: int, at: int, deed: str, limit: int) -> None:
        super().__init__()
        self.layer, self.at, self.deed, self.limit, self.passes = (
            nn.Linear(features, num_classes),
            at,
            deed,
            limit,
            0,
        )

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        if self.training and self.deed == "pause":
            time.sleep(0.01)
        if self.training and self.passes >= self.at and len(inputs) > self.limit:
            if self.deed == "memory":
                too_much(inputs.device)
            first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if self.deed == "kill" and os.environ.get("RANK") == "1" and first_attempt:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.deed == "assert":
                self.layer.weight[torch.full((1,), 10**6, device=inputs.device)]
        out: Tensor = self.layer(inputs.flatten(1))
        return out


def at_pass(
    input_shape: Sequence[int], num_classes: int, deed: str = "pause", at: int = 0, limit: int = 0
) -> nn.Module:
    """One layer.

    Args:
        deed: pause, memory (ask for more than there is), kill (of rank 1, in its first attempt) or assert (an index
            that the device finds out of range).
        at: the training pass from which on it happens.
        limit: it happens with more samples than that.
    """
    return AtPass(prod(input_shape), num_classes, at, deed, limit)


def too_much(device: torch.device) -> None:
    """Ask the device for twice its memory."""
    torch.empty(2 * torch.cuda.get_device_properties(device).total_memory, dtype=torch.uint8, device=device)


def products(input_shape: Sequence[int], num_classes: int, width: int = 4096, depth: int = 4) -> nn.Module:
    """Nothing but matrix products of one size, and a small layer at the end."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, num_classes))
