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
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from benchmarks.paired_timing import STRETCH, Row, Seconds, alternate, program
from benchmarks.workloads import BATCH, MLP, Rivals, adamw, against, hand_written, mlp, shuffled, vectors
from multigpu_cli.distributed.launch_env import LaunchEnv

Batch = tuple[Tensor, Tensor]


class Batches(IterableDataset[Batch]):
    """Whole batches from memory, as many as a run has steps."""

    def __init__(self, steps: int, batch: int) -> None:
        self.steps, self.batch = steps, batch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        data = vectors("train")
        assert data is not None
        return islice(shuffled(data, self.batch), self.steps)


class Race(NamedTuple):
    """What a peer is given: after each of its steps it calls the rivals, on every worker alike."""

    steps: int
    rivals: Rivals
    seconds: Seconds
    stock: bool = False
    workers: int = 1

    def batches(self) -> Batches:
        return Batches(self.steps, BATCH // self.workers)


Peer = Callable[[Race], None]


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    turns = 10 if tiny else 420
    rows: list[Row] = []
    for name in installed():
        _, peer, ways = PEERS[name]
        for stock in ways:
            rows += _compared(f"{'stock' if stock else 'bare'}: {name}", turns, peer, stock)
    return rows


def installed() -> Iterator[str]:
    """The peers that are here; of the others it is said that they are not."""
    for name, (package, *_) in PEERS.items():
        if find_spec(package):
            yield name
        else:
            print(f"{name}: {package} is not installed (pip install '.[bench]')", file=sys.stderr)


def _compared(name: str, turns: int, peer: Peer, stock: bool) -> list[Row]:
    seconds = Seconds()
    rivals = Rivals({"raw": hand_written(fused=False)}, seconds)
    with tempfile.TemporaryDirectory() as folder, rank_output(Path(folder)):
        peer(Race(turns * STRETCH, rivals, seconds, stock))
    return [
        seconds.ratio(f"{name} / hand-written", "ours", "raw"),
        seconds.over(f"{name} over hand-written", "ours", "raw"),
    ]


@contextmanager
def rank_output(folder: Path) -> Iterator[None]:
    """What a peer writes goes into the folder, what it says nowhere."""
    quiet = warnings.catch_warnings(action="ignore")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere), quiet, chdir(folder):
        yield


def ours(race: Race) -> None:
    """At its defaults; with the default optimizer's arithmetic, though fused, and without clipping as the others."""
    batch = {"batch_size": str(BATCH // race.workers)}
    flags = MLP | batch | {"epochs": "1000", "max_steps": str(race.steps), "max_grad_norm": "off"}
    against(race.rivals.rivals, flags, Path("run"), race.seconds, LaunchEnv.current())


def control(race: Race) -> None:
    race.seconds.of = alternate({"ours": hand_written(fused=False), **race.rivals.rivals}, race.steps // STRETCH).of


def lightning(race: Race) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Batch, _: int) -> Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            if race.stock:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.net, fused=False)

    class Between(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            race.rivals.update(trainer.global_step)

    given: dict[str, Any] = {"max_steps": race.steps, "callbacks": [Between()], **_placed(race)}
    bare = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    L.Trainer(**given | ({} if race.stock else dict.fromkeys(bare, False))).fit(Module(), race.batches())


def _placed(race: Race) -> dict[str, Any]:
    return {"accelerator": "cpu", "devices": race.workers, "strategy": "ddp" if race.workers > 1 else "auto"}


def fabric(race: Race) -> None:
    import lightning as L

    framework = L.Fabric(**_placed(race))
    framework.launch()
    model = mlp()
    model, optimizer = framework.setup(model, adamw(model, fused=False))
    loader = framework.setup_dataloaders(torch.utils.data.DataLoader(race.batches(), batch_size=None))
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        framework.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        race.rivals.update(number)


def accelerate(race: Race) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = mlp()
    model, optimizer = accelerator.prepare(model, adamw(model, fused=False))
    loader = torch.utils.data.DataLoader(race.batches(), batch_size=None)
    if race.workers == 1:  # of several, rank 0 would read and broadcast the batches of all
        loader = accelerator.prepare(loader)
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        race.rivals.update(number)


def ignite(race: Race) -> None:
    import ignite.distributed as idist
    from ignite.contrib.handlers import ProgressBar
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver, TerminateOnNan
    from ignite.metrics import RunningAverage

    if race.workers > 1:
        idist.initialize("gloo")
    model = idist.auto_model(mlp())
    optimizer = adamw(model, fused=False)
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: race.rivals.update(engine.state.iteration))
    if race.stock:
        RunningAverage(output_transform=float).attach(trainer, "loss")
        ProgressBar().attach(trainer, ["loss"])
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        kept = Checkpoint({"model": model, "optimizer": optimizer}, DiskSaver("kept", create_dir=True))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, kept)
    trainer.run(race.batches(), max_epochs=1)


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
