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
from multigpu_cli.models.networks.convnet import HarConvNet as har_convnet
from multigpu_cli.models.networks.gpt import GPT as gpt

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
        shape, classes: of a sample, and how many outputs the limit's network has.
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
        "gpt2-compiled": _gpt2("default", block=16, vocabulary=61, batch=2) if tiny else _gpt2("default"),
        "gpt2": _gpt2(block=16, vocabulary=61, batch=2) if tiny else _gpt2(),
        "resnet50": _pictures(side=32, width=4, batch=4) if tiny else _pictures(),
        "har": _har("off", Steps(2, 4, 2) if tiny else Steps(300, 3000, 30)),
        "har-compiled": _har("reduce-overhead", Steps(2, 4, 2) if tiny else Steps(300, 3000, 30)),
    }
    length = {"max_steps": 8} if tiny else {}
    name = f"Fashion-MNIST, seconds to {GOAL:.0%} on the validation part"
    return found | {"fashion-mnist": Job(name, length, folder="fashion-mnist")}


def _gpt2(compiled: str = "off", block: int = 1024, vocabulary: int = 50257, batch: int = 16) -> Job:
    """The limit's vocabulary is padded by hand to a multiple of 64, as nanoGPT's is."""
    small = vocabulary < 1000
    return Job(
        f"GPT-2 124M, bf16, 1,024 tokens, --compile {compiled}",
        {"data": "benchmarks.gpu_workloads:tokens", "model": "gpt", "batch_size": batch, "compile": compiled},
        gpt,
        {"depth": 1, "heads": 2, "width": 16} if small else {"depth": 12, "heads": 12, "width": 768},
        (block,),
        vocabulary + -vocabulary % 64,
        Steps(2, 4, 2) if small else Steps(40, 200, 10),
        data_args={"windows": 8 if small else 2048, "block": block, "vocabulary": vocabulary},
    )


def _pictures(side: int = 224, width: int = 64, batch: int = 256) -> Job:
    data = {"shape": f"[3,{side},{side}]", "train": 32 * batch, "val": 0, "test": 0}
    return Job(
        "ResNet-50, 224×224, bf16, images in GPU memory",
        {"data": "synthetic", "model": "benchmarks.gpu_workloads:resnet50", "batch_size": batch},
        resnet50,
        {"width": width},
        (3, side, side),
        10,
        Steps(2, 4, 2) if width < 64 else Steps(40, 200, 10),
        data_args=data,
    )


def _har(compiled: str, steps: Steps) -> Job:
    """Without the dataset's augmentation, which the limit does not have."""
    flags = {"data": "har", "model": "har-convnet", "batch_size": 64, "compile": compiled}
    name = f"HAR convnet, batch 64, --compile {compiled}"
    plain = {"rotation": 0, "scaling": 0}
    return Job(name, flags, har_convnet, {}, (9, 128), 6, steps, "har", plain, aim=0.9)


def resnet50(input_shape: Sequence[int], num_classes: int, width: int = 64) -> nn.Module:
    """He et al. 2016 with the stride in the 3×3 convolution, as torchvision's, which need not be installed."""
    stem = [*_convolve(input_shape[0], width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    blocks, channels = [], width
    for stage, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            inner = width * 2**stage
            blocks.append(Bottleneck(channels, inner, 2 if stage and not number else 1))
            channels = 4 * inner
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        first, second = _convolve(channels, inner, 1, 1), _convolve(inner, inner, 3, stride)
        layers = [*first, nn.ReLU(inplace=True), *second, nn.ReLU(inplace=True), *_convolve(inner, 4 * inner, 1, 1)]
        self.residual = nn.Sequential(*layers)
        same = stride == 1 and channels == 4 * inner
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolve(channels, 4 * inner, 1, stride))

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.residual(images) + self.shortcut(images))


def _convolve(channels: int, out: int, size: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(out)]


def tokens(windows: int = 2048, block: int = 1024, vocabulary: int = 50257) -> DataSource:
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
