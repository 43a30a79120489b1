"""A user's own dataset and networks, as --data and --model name them; some of them kill or stop their run.

OWN_DEED=RANK:COUNT:SIGNAL[:WHOM] in the environment: at its COUNT-th training pass that rank sends the signal, to
itself or to its parent (the agent). OWN_AFTER: it waits until such a path exists, as a checkpoint.
OWN_PAUSE: seconds that each training pass takes longer.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.capabilities import MODELS
from multigpu_cli.runtime import factories


def tensors(split: str, seed: int, train: int = 60, shape: Sequence[int] = (6,)) -> TensorDataset:
    """Samples of three classes that can be told apart, mostly."""
    count = {"train": train, "val": 21, "test": 22}[split]
    generator = torch.Generator().manual_seed(seed + len(split))
    targets = torch.arange(count) % 3
    noise = torch.randn(count, *shape, generator=generator)
    return TensorDataset(noise + 0.7 * (targets - 1).view(-1, *[1] * len(shape)), targets)


def wide(split: str, seed: int) -> TensorDataset:
    return tensors(split, seed, shape=(5000,))


def no_validation(split: str, seed: int) -> TensorDataset | None:
    return None if split == "val" else tensors(split, seed)


def without_evaluation(split: str, seed: int) -> TensorDataset | None:
    return tensors(split, seed) if split == "train" else None


class Items(Dataset[tuple[Tensor, int]]):
    """The same samples one by one, with noise of their own, as augmentation in a user's dataset has it."""

    num_classes = 3

    def __init__(self, split: str, seed: int) -> None:
        self.inputs, self.targets = tensors(split, seed).tensors

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index] + 0.1 * torch.randn(6), int(self.targets[index])


def sentences(split: str, seed: int) -> TensorDataset:
    """Sequences of 9 tokens out of 5, each a count upwards, of which only some targets count: from 9 down to none."""
    count = {"train": 60, "val": 21, "test": 22}[split]
    generator = torch.Generator().manual_seed(seed + len(split))
    tokens = (torch.randint(5, (count, 1), generator=generator) + torch.arange(10)) % 5
    length = torch.randint(10, (count, 1), generator=generator)
    return TensorDataset(tokens[:, :-1], torch.where(torch.arange(9) < length, tokens[:, 1:], -100))


class Deed(nn.Module):
    """Passes its input on, and does at some pass what the environment says."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.pause = float(os.environ.get("OWN_PAUSE", 0))
        rank, count, what, whom = (os.environ.get("OWN_DEED", "-1:0:SIGTERM") + ":self").split(":")[:4]
        self.at = int(count) if rank == os.environ.get("RANK", "0") else -1
        self.deed = (os.getppid() if whom == "parent" else os.getpid(), signal.Signals[what])
        self.after = os.environ.get("OWN_AFTER")

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            time.sleep(self.pause)
            if self.passes == self.at:
                print(f"rank {os.environ.get('RANK')} does it")
                if self.after:
                    _wait_for(self.after)
                os.kill(*self.deed)
        return inputs


def _wait_for(pattern: str) -> None:
    until = time.monotonic() + 60
    while not list(Path().glob(pattern)):
        if time.monotonic() > until:
            raise TimeoutError(f"there is no {pattern}")
        time.sleep(0.01)


def net(input_shape: Sequence[int], num_classes: int, norm: bool = True, dropout: float = 0.2) -> nn.Module:
    """A small perceptron."""
    between: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(
        Deed(),
        nn.Flatten(),
        nn.Linear(
            int(torch.Size(input_shape).numel()), 16, bias=not norm
        ),  # or Adam blows up the bias's rounding noise
        *between,
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(16, num_classes),
    )


class Double(nn.Module):
    """One of our networks in double precision."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, network: str, normed: bool = True) -> None:
        super().__init__()
        offered = {"input_shape": input_shape, "num_classes": num_classes}
        small = {"width": 8} if network != "own" else {"norm": normed}
        factory = net if network == "own" else factories.find_factory(network, MODELS, flag="--model")
        self.inner = factories.call_factory(factory, offered, small, where="model").double()

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.inner(inputs.double())
        return logits


def explosive(input_shape: Sequence[int], num_classes: int, at: int = 1) -> nn.Module:
    """Its gradient is not finite from pass `at` on."""

    class Explosive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.passes = net(input_shape, num_classes), 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.passes += self.training
            logits: Tensor = self.inner(inputs)
            return logits * float("nan") if self.training and self.passes >= at else logits

    return Explosive()


class Spoilt(nn.Module):
    """In training its outputs are NaN for the samples with a value above `limit`."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, limit: float) -> None:
        super().__init__()
        self.inner, self.limit = net(input_shape, num_classes), limit

    def forward(self, inputs: Tensor) -> Tensor:
        spoilt = (inputs.flatten(1).amax(1, keepdim=True) > self.limit) & self.training
        return torch.where(spoilt, torch.nan, 1.0) * self.inner(inputs)  # type: ignore[no-any-return]


class SlowItems(Items):
    """Each sample takes a millisecond to fetch."""

    seconds = 1e-3

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return super().__getitem__(index)


def slow_rank(input_shape: Sequence[int], num_classes: int, seconds: float = 0.02) -> nn.Module:
    """On rank 1 each training pass takes so much longer."""
    network = net(input_shape, num_classes)
    assert isinstance(network, nn.Sequential)
    assert isinstance(network[0], Deed)
    network[0].pause = seconds if os.environ.get("RANK") == "1" else 0.0
    return network


class OneSample(Items):
    """The same sample again and again: all gradients are alike."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[0], int(self.targets[0])
