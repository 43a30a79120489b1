"""Whole training steps from bytes in memory, against the limit and against the loop of torch's tutorials.

    python -m benchmarks.end_to_end

The limit is the model's own forward, backward and optimizer in its fastest exact form (channels_last, fused) on batches
that lie ready. Our run crops, mirrors and normalises, clips, watches and writes as it does by default.
"""

import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.paired_timing import STRETCH, Row, Seconds, program
from benchmarks.workloads import BATCH, CLASSES, MLP, PICTURES, SHAPE, PerSample, adamw, against, mlp, one_step, resnet8


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    return [*_resnet(4 if tiny else 14, 16 if tiny else 128), *_mlp(8 if tiny else 280)]


def ready(batch: int, *, channels_last: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """The same few batches for ever, already what the model meets."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    targets = torch.arange(batch) % CLASSES
    return cycle([(torch.randn(batch, *SHAPE).to(memory_format=form), targets) for _ in range(4)])


def limit(batch: int, *, channels_last: bool) -> Callable[[], None]:
    """A ResNet-8's step on batches that lie ready."""
    torch.manual_seed(0)
    model = resnet8()
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return one_step(model, adamw(model, fused=True), ready(batch, channels_last=channels_last))


def _resnet(turns: int, batch: int) -> list[Row]:
    rivals: dict[str, Callable[[], object]] = {
        "limit": limit(batch, channels_last=True),
        "plain": limit(batch, channels_last=False),
    }
    flags = PICTURES | {"model": "benchmarks.workloads:resnet8", "batch_size": str(batch), "epochs": "1000"}
    with tempfile.TemporaryDirectory() as folder:
        flags |= {"max_steps": str(turns * STRETCH)}
        found = against(rivals, flags, Path(folder), Seconds(), sets=["data.args.samples=2048"])
    return [
        found.micro(f"ResNet-8, batch {batch}: the limit, a step", "limit"),
        found.ratio(f"ResNet-8, batch {batch}: limit / ours", "limit", "ours", aim=0.98, at_least=True),
        found.ratio(f"ResNet-8, batch {batch}: limit / the same without channels_last", "limit", "plain"),
    ]


def _mlp(turns: int) -> list[Row]:
    torch.manual_seed(0)
    model, data = mlp(SHAPE), DataLoader(PerSample(), batch_size=BATCH, shuffle=True, drop_last=True)
    batches = (tuple(batch) for _ in cycle([0]) for batch in data)
    lying, prepared = mlp(SHAPE), ready(BATCH)
    rivals: dict[str, Callable[[], object]] = {
        "tutorial": one_step(model, adamw(model, fused=False), batches),
        "limit": one_step(lying, adamw(lying, fused=True), prepared),
    }
    with tempfile.TemporaryDirectory() as folder:
        flags = MLP | PICTURES | {"epochs": "1000", "max_steps": str(turns * STRETCH)}
        found = against(rivals, flags, Path(folder), Seconds())
    return [
        found.ratio("MLP from images: ours / hand-written + DataLoader", "ours", "tutorial", aim=0.5),
        found.ratio("MLP from images: limit / ours", "limit", "ours"),
    ]


if __name__ == "__main__":
    program(measure, __doc__)
