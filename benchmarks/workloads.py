"""The jobs that the benchmarks run: the same networks and batches for us, the hand-written loop and the peers."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset, TensorDataset

from benchmarks.paired_timing import Seconds
from multigpu_cli import engine
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.source import DataSource
from multigpu_cli.data.transforms import fit_standardised, shift_and_mirror
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.models.networks.convnet import ResNet
from multigpu_cli.monitor.console import Console, ProgressDisplay
from multigpu_cli.run.open import resolve_request
from multigpu_cli.run.request.spec import FromConfig

FEATURES, CLASSES, BATCH = 3072, 10, 32
MLP = {
    "data": "benchmarks.workloads:vectors",
    "model": "benchmarks.workloads:mlp",
    "batch_size": str(BATCH),
    "lr": "1e-3",
}
PICTURES = {"data": "benchmarks.workloads:pictures", "lr": "1e-3"}
SHAPE, REACH = (3, 32, 32), 4
VOCABULARY, LENGTH = 512, 64
MAX_NORM = 1.0


def mlp(input_shape: Sequence[int] = (FEATURES,), num_classes: int = CLASSES) -> nn.Module:
    """3072-64-64-10: a step so short that every microsecond beside it shows."""
    flat = [nn.Flatten()] if len(input_shape) > 1 else []
    return nn.Sequential(
        *(*flat, nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))
    )


def resnet8(input_shape: Sequence[int] = SHAPE, num_classes: int = CLASSES, width: int = 16) -> nn.Module:
    """Three stages of one residual block each (He et al. 2016, §4.2 with n = 1)."""
    return ResNet(tuple(input_shape), num_classes, width, blocks=(1, 1, 1))


def vectors(split: str, samples: int = 2048) -> TensorDataset | None:
    """Random vectors and labels; the training split alone, so that a run is nothing but steps."""
    if split != "train":
        return None
    torch.manual_seed(1)
    return TensorDataset(torch.randn(samples, FEATURES), torch.arange(samples) % CLASSES)


def pictures(mode: str = "flatten", samples: int = 2048) -> DataSource:
    """Random 32×32×3 images as bytes; training crops, mirrors and normalises them."""
    torch.manual_seed(1)
    images = torch.randint(0, 256, (samples, *SHAPE), dtype=torch.uint8)
    return DataSource(
        train=TensorDataset(images, torch.arange(samples) % CLASSES),
        val=None,
        test=None,
        input_shape=SHAPE,
        num_classes=CLASSES,
        prepare=fit_standardised(images, mode),
        augment=partial(shift_and_mirror, reach=REACH),
    )


def tokens(samples: int = 512) -> DataSource:
    """Random sequences of tokens, each followed by its next one."""
    torch.manual_seed(1)
    drawn = torch.randint(VOCABULARY, (samples, LENGTH + 1))
    return DataSource(
        train=TensorDataset(drawn[:, :-1], drawn[:, 1:]),
        val=None,
        test=None,
        input_shape=(LENGTH,),
        num_classes=VOCABULARY,
        task="language-model",
        model="gpt",
    )


class PerSample(Dataset[tuple[Tensor, int]]):
    """The same images as torch's tutorials have them: one by one, with torchvision's steps in plain torch.

    RandomCrop(32, padding=4), RandomHorizontalFlip, ToTensor, Normalize.
    """

    def __init__(self, samples: int = 2048) -> None:
        source = pictures(samples=samples)
        assert isinstance(source.train, TensorDataset)
        self.images, self.targets = source.train.tensors

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        padded = pad(self.images[index], (REACH,) * 4)
        down, right = (int(torch.randint(0, 2 * REACH + 1, (1,)).item()) for _ in range(2))
        image = padded[:, down : down + 32, right : right + 32]
        image = image.flip(-1) if torch.rand(1) < 0.5 else image
        image = image.float().div(255)
        mean, deviation = torch.as_tensor((0.5, 0.5, 0.5)), torch.as_tensor((0.29, 0.29, 0.29))
        return image.sub_(mean.view(-1, 1, 1)).div_(deviation.view(-1, 1, 1)), int(self.targets[index])


def adamw(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=fused or None)


def shuffled(data: TensorDataset, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a hand-written loop does with tensors in memory, epoch after epoch."""
    inputs, targets = data.tensors
    while True:
        for indices in torch.randperm(len(inputs)).split(batch):
            yield inputs[indices], targets[indices]


def one_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    *,
    max_norm: float | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[], None]:
    """The body of the hand-written loop."""
    trained = list(model.parameters())

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        with around():
            cross_entropy(model(inputs), targets).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()

    return step


def hand_written(*, fused: bool, max_norm: float | None = None) -> Callable[[], None]:
    """The hand-written loop's step of the MLP on the tensors that we train on."""
    torch.manual_seed(0)
    model, data = mlp(), vectors("train")
    assert data is not None
    return one_step(model, adamw(model, fused=fused), shuffled(data, BATCH), max_norm=max_norm)


class Rivals(ProgressDisplay):
    """Stands where the progress bar is: after each turn of our steps the rivals take theirs."""

    def __init__(self, rivals: dict[str, Callable[[], object]], seconds: Seconds) -> None:
        super().__init__(0)
        self.rivals, self._seconds = rivals, seconds
        self._last, self._position = 0.0, 0

    def update(self, step: int, fields: Mapping[str, Any] | None = None) -> None:
        if self._position >= self._seconds.skipped:
            self._seconds.add("ours", self._seconds.clock() - self._last)
        self._position = (self._position + 1) % self._seconds.stretch
        if not self._position:
            for name, rival in self.rivals.items():
                self._seconds.turn(name, rival)
        self._last = self._seconds.clock()


class Arena(Console):
    """A console whose progress bar is `Rivals`; what a run says goes nowhere."""

    def __init__(self, rivals: Rivals) -> None:
        super().__init__("normal", open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
        self.rivals = rivals

    def progress(self, total_steps: int, initial: int = 0) -> ProgressDisplay:
        return self.rivals


def against(
    rivals: dict[str, Callable[[], object]],
    flags: dict[str, str],
    folder: Path,
    seconds: Seconds,
    launch_env: LaunchEnv | None = None,
    sets: Sequence[str] = (),
) -> Seconds:
    """One whole run of ours, with the rivals in between its steps."""
    config = resolve(flags | {"save_dir": str(folder), "resume": "never"}, sets, None)
    strategy = flags.get("multi_gpu", "ddp") if launch_env else "single"
    choice = Placement(strategy, (torch.device("cpu"),), 0, "benchmark", "gloo" if launch_env else None)
    console = Arena(Rivals(rivals, seconds))
    with resolve_request(config, choice, launch_env, console, lambda error: None, FromConfig()) as request:
        engine.run(request)
    return seconds
