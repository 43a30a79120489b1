"""What is measured on a GPU: networks, batches, and how many steps."""

import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton_package
from torch.utils.data import TensorDataset

from multigpu_cli.data.source import DataSource
from multigpu_cli.models.networks.convnet import ResNet
from multigpu_cli.models.networks.convnet import build_har_convnet as har_convnet
from multigpu_cli.models.networks.gpt import build as gpt

GOAL = 0.94  # accuracy on Fashion-MNIST's validation part


class CannotRun(Exception):
    """What a job needs is not there; says what."""


class Steps(NamedTuple):
    """How many: before the clock starts, timed (a multiple of the first), and looked at kernel by kernel."""

    warm_up: int
    timed: int
    traced: int


@dataclass(frozen=True)
class Job:
    """One network on one kind of batch, for us and for the limit: the same network on a batch that lies ready.

    Attributes:
        name: for people.
        flags: of our run, without model.args, folder and length; batch_size and compile are the limit's too.
        build, args: the network, for the limit; None where there is none.
        shape, classes: of a sample, and how many targets there are.
        folder: of the real dataset among the others; "" where none is needed.
        aim: our rate as a share of the limit's.
    """

    name: str
    flags: Mapping[str, Any]
    build: Callable[..., nn.Module] | None = None
    args: Mapping[str, int] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    classes: int = 0
    steps: Steps = Steps(0, 0, 0)
    folder: str = ""
    data_args: Mapping[str, Any] = field(default_factory=dict)
    aim: float = 0.98

    @property
    def sides(self) -> tuple[str, ...]:
        return ("ours", "limit") if self.build else ("ours",)

    @property
    def sets(self) -> list[str]:
        """What --set gives."""
        data = [f"data.args.{name}={value}" for name, value in self.data_args.items()]
        return data + [f"model.args.{name}={value}" for name, value in self.args.items()]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets: tokens where a sample is a row of them, otherwise numbers and classes."""
        size = int(self.flags["batch_size"])
        if len(self.shape) == 1:
            inputs, targets = tokens(size, self.shape[0], self.classes).train.tensors  # type: ignore[attr-defined]
            return inputs, targets
        return torch.randn(size, *self.shape), torch.arange(size) % self.classes


def jobs(*, tiny: bool = False) -> dict[str, Job]:
    """By a short name; tiny ones only show that they run."""
    found = {
        "gpt2": _gpt2(block=16, vocabulary=64, batch=2) if tiny else _gpt2(),
        "resnet34": _pictures(side=32, width=4, batch=4) if tiny else _pictures(),
        "har": _har("off", Steps(2, 4, 2) if tiny else Steps(300, 3000, 30)),
        "har-compiled": _har("reduce-overhead", Steps(2, 4, 2) if tiny else Steps(300, 3000, 30)),
    }
    length = {"max_steps": 8} if tiny else {}
    name = f"Fashion-MNIST, seconds to {GOAL:.0%} on the validation part"
    return found | {"fashion-mnist": Job(name, length, folder="fashion-mnist")}


def _gpt2(block: int = 1024, vocabulary: int = 50304, batch: int = 16) -> Job:
    small = vocabulary < 1000
    return Job(
        "GPT-2 124M, bf16, 1,024 tokens",
        {"data": "benchmarks.gpu_workloads:tokens", "model": "gpt", "batch_size": batch},
        gpt,
        {"depth": 1, "heads": 2, "width": 16} if small else {"depth": 12, "heads": 12, "width": 768},
        (block,),
        vocabulary,
        Steps(2, 4, 2) if small else Steps(40, 200, 10),
        data_args={"windows": 8 if small else 2048, "block": block, "vocabulary": vocabulary},
    )


def _pictures(side: int = 224, width: int = 64, batch: int = 256) -> Job:
    data = {"shape": f"[3,{side},{side}]", "train": 32 * batch, "val": 0, "test": 0}
    return Job(
        "ResNet-34, 224×224, bf16, images in GPU memory",
        {"data": "synthetic", "model": "benchmarks.gpu_workloads:resnet34", "batch_size": batch},
        resnet34,
        {"width": width},
        (3, side, side),
        10,
        Steps(2, 4, 2) if width < 64 else Steps(40, 200, 10),
        data_args=data,
    )


def _har(compiled: str, steps: Steps) -> Job:
    flags = {"data": "har", "model": "har-convnet", "batch_size": 64, "compile": compiled}
    name = f"HAR convnet, batch 64, --compile {compiled}"
    return Job(name, flags, har_convnet, {}, (9, 128), 6, steps, "har", aim=0.9)


def resnet34(input_shape: Sequence[int], num_classes: int, width: int = 64) -> nn.Module:
    """21.8 million parameters, of ResNet-50's size and built of our blocks."""
    return ResNet(tuple(input_shape), num_classes, width, blocks=(3, 4, 6, 3))


def tokens(windows: int = 2048, block: int = 1024, vocabulary: int = 50304) -> DataSource:
    """Random tokens, of GPT-2's vocabulary."""
    torch.manual_seed(1)
    drawn = torch.randint(0, vocabulary, (windows, block + 1))
    train = TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
    kinds: dict[str, Any] = {"model": "gpt", "task": "language-model"}
    return DataSource(train=train, val=None, test=None, input_shape=(block,), num_classes=vocabulary, **kinds)


def check_compiler(job: Job) -> None:
    """torch.compile generates Triton's code for a GPU; torch for CUDA brings it along.

    Raises:
        CannotRun: the job is compiled, and Triton is not installed.
    """
    if job.flags.get("compile", "off") != "off" and not has_triton_package():
        raise CannotRun("Triton is not installed, and torch.compile needs it for a GPU")


def data_dir(job: Job, homes: Sequence[Path], scratch: Path) -> dict[str, str]:
    """The flag that names a job's dataset; nothing where it makes its own.

    Args:
        homes: folders that may hold it in one of its own; an archive in there is unpacked first.
        scratch: where to.

    Raises:
        CannotRun: it is in none of them.
    """
    if not job.folder:
        return {}
    found = next((home / job.folder for home in homes if (home / job.folder).is_dir()), None)
    if found is None:
        raise CannotRun(f"no folder {job.folder} in {' or '.join(map(str, homes))}: --data names another place")
    unpacked = scratch / job.folder
    for archive in found.glob("*.tar*"):
        if not unpacked.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(unpacked, filter="data")
        return {"data_dir": str(unpacked)}
    return {"data_dir": str(found)}
