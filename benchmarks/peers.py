"""The same steps of the same MLP by other trainers, each against the hand-written loop in one process.

    pip install '.[bench]'
    python -m benchmarks.peers

Bare: nothing logged, nothing saved. Stock: their loggers, progress bars and checkpoints as they come. Every one trains
on batches drawn from the same tensors, unclipped; what is not installed is said and left out.
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from benchmarks.jobs import BATCH, MLP, Rivals, adamw, against, hand_written, mlp, shuffled, vectors
from benchmarks.pairs import STRETCH, Row, Seconds, alternate, program

Batch = tuple[Tensor, Tensor]
Peer = Callable[[int, "Rivals", Seconds, bool], None]


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    turns = 10 if tiny else 420
    rows: list[Row] = []
    for name, (package, peer, ways) in PEERS.items():
        if find_spec(package) is None:
            print(f"{name}: {package} is not installed (pip install '.[bench]')", file=sys.stderr)
            continue
        for stock in ways:
            rows += _compared(f"{'stock' if stock else 'bare'}: {name}", turns, peer, stock)
    return rows


def _compared(name: str, turns: int, peer: Peer, stock: bool) -> list[Row]:
    seconds = Seconds()
    rivals = Rivals({"raw": hand_written(fused=False)}, seconds)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        os.chdir(folder)
        try:
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                peer(turns * STRETCH, rivals, seconds, stock)
        finally:
            os.chdir(before)
    return [
        seconds.ratio(f"{name} / hand-written", "ours", "raw"),
        seconds.over(f"{name} over hand-written", "ours", "raw"),
    ]


class Batches(IterableDataset[Batch]):
    """Whole batches from memory, as many as a run has steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        data = vectors("train")
        assert data is not None
        return islice(shuffled(data, BATCH), self.steps)


def ours(steps: int, rivals: Rivals, seconds: Seconds, stock: bool) -> None:
    """At its defaults; with the default optimizer's arithmetic, though fused, and without clipping as the others."""
    flags = MLP | {"epochs": "1000", "max_steps": str(steps), "max_grad_norm": "off"}
    against(rivals.rivals, flags, Path("run"), seconds)


def control(steps: int, rivals: Rivals, seconds: Seconds, stock: bool) -> None:
    seconds.of = alternate({"ours": hand_written(fused=False), **rivals.rivals}, steps // STRETCH).of


def lightning(steps: int, rivals: Rivals, seconds: Seconds, stock: bool) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Batch, _: int) -> Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            if stock:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.net, fused=False)

    class Between(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            rivals.update(trainer.global_step)

    given: dict[str, Any] = {"max_steps": steps, "accelerator": "cpu", "devices": 1, "callbacks": [Between()]}
    bare = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    L.Trainer(**given | ({} if stock else dict.fromkeys(bare, False))).fit(Module(), Batches(steps))


def fabric(steps: int, rivals: Rivals, seconds: Seconds, stock: bool) -> None:
    import lightning as L

    framework = L.Fabric(accelerator="cpu", devices=1)
    model = mlp()
    model, optimizer = framework.setup(model, adamw(model, fused=False))
    loader = framework.setup_dataloaders(torch.utils.data.DataLoader(Batches(steps), batch_size=None))
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        framework.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        rivals.update(number)


def accelerate(steps: int, rivals: Rivals, seconds: Seconds, stock: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = mlp()
    loader = torch.utils.data.DataLoader(Batches(steps), batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, adamw(model, fused=False), loader)
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        rivals.update(number)


def ignite(steps: int, rivals: Rivals, seconds: Seconds, stock: bool) -> None:
    from ignite.contrib.handlers import ProgressBar
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver, TerminateOnNan
    from ignite.metrics import RunningAverage

    model = mlp()
    optimizer = adamw(model, fused=False)
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: rivals.update(engine.state.iteration))
    if stock:
        RunningAverage(output_transform=float).attach(trainer, "loss")
        ProgressBar().attach(trainer, ["loss"])
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        kept = Checkpoint({"model": model, "optimizer": optimizer}, DiskSaver("kept", create_dir=True))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, kept)
    trainer.run(Batches(steps), max_epochs=1)


PEERS: dict[str, tuple[str, Peer, tuple[bool, ...]]] = {
    "hand-written loop": ("torch", control, (False,)),
    "ours": ("torch", ours, (True,)),
    "Ignite": ("ignite", ignite, (False, True)),
    "Fabric": ("lightning", fabric, (False,)),
    "Accelerate": ("accelerate", accelerate, (False,)),
    "Lightning": ("lightning", lightning, (False, True)),
}


if __name__ == "__main__":
    program(measure, __doc__)
