"""The parts of one run, put together in the order in which they need each other."""

import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.snapshot import Kept, Progress
from multigpu_cli.checkpoint.store import Checkpoint, Store, read_manifest
from multigpu_cli.checkpoint.weights import warm_start
from multigpu_cli.config.schema import Config
from multigpu_cli.data.loader import Loader
from multigpu_cli.errors import RequestError
from multigpu_cli.faults.nonfinite import Nonfinite
from multigpu_cli.faults.stop import Agreement, StopRequest
from multigpu_cli.models.build import build_model
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.journal import Journal
from multigpu_cli.monitor.meters import Meters
from multigpu_cli.monitor.progress import Progress as Bar
from multigpu_cli.monitor.tensorboard import TensorBoard
from multigpu_cli.monitor.trace import SampleTrace
from multigpu_cli.optimizers import averaged, build_optimizer
from multigpu_cli.planning.plan import Plan
from multigpu_cli.run.settle import Settled
from multigpu_cli.runtime import plugins
from multigpu_cli.runtime.collectives import decided, together
from multigpu_cli.runtime.determinism import seed_weights
from multigpu_cli.runtime.devices import Choice
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.world import World
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.strategies.data_parallel import DataParallel
from multigpu_cli.strategies.distributed import Distributed
from multigpu_cli.strategies.exact import Exact
from multigpu_cli.strategies.single import Single
from multigpu_cli.tasks.base import Task
from multigpu_cli.tasks.registry import TASKS


@dataclass
class Run:
    """Everything that a training loop touches."""

    settled: Settled
    choice: Choice
    world: World
    task: Task
    kept: Kept
    strategy: Strategy
    precision: Precision
    train: Loader
    val: Loader | None
    test: Loader | None
    store: Store
    journal: Journal
    tensorboard: TensorBoard | None
    console: Console
    bar: Bar
    meters: Meters
    nonfinite: Nonfinite
    stop: StopRequest
    agreement: Agreement
    trace: SampleTrace | None
    trained: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.trained = [p for p in self.kept.model.parameters() if p.requires_grad]

    @property
    def config(self) -> Config:
        return self.settled.config

    @property
    def plan(self) -> Plan:
        return self.settled.plan

    @property
    def progress(self) -> Progress:
        return self.kept.progress

    @property
    def folder(self) -> Path:
        return Path(self.settled.start.folder)

    @property
    def eval_batch(self) -> int:
        """Samples in one batch of an evaluation: the same on any number of workers; it keeps no activations."""
        return 4 * self.plan.batches.micro_batch


def build_learner(settled: Settled, world: World) -> tuple[Kept, Task, Precision]:
    """Model, optimizer and task on this rank's device; no communication, so that errors can be compared.

    Raises:
        RequestError: the model, the task or the first batch's shape does not fit.
    """
    config, source = settled.config, settled.source
    task = _task(settled)
    offered = {
        "input_shape": source.input_shape,
        "num_classes": source.num_classes,
        "mode": config.data.mode,
        "seed": config.reproducibility.seed,
    }
    seed_weights(config.reproducibility.seed)
    model = build_model(config.model, settled.model, offered)
    if config.model.init_from and not settled.start.checkpoint:
        warm_start(model, Path(config.model.init_from))
    model.to(world.device).train()
    precision = Precision(settled.plan.precision, world.device)
    ema = config.optimizer.ema
    average = None if ema == "off" else averaged(model, float(ema))
    return Kept(model, build_optimizer(model, config.optimizer), precision, average, Progress()), task, precision


def assemble(
    settled: Settled, choice: Choice, world: World, console: Console, stop: StopRequest, stack: ExitStack
) -> Run:
    """Build everything that trains; what opens is closed by the stack. The folder is already ours."""
    kept, task, precision = together(world, lambda: build_learner(settled, world))
    _restore(kept, settled, world)
    config, folder, device = settled.config, Path(settled.start.folder), world.device
    loaders = {
        name: None
        if split is None
        else Loader(
            split,
            settled.source,
            config.data,
            device=device,
            seed=config.reproducibility.seed,
            workers_here=world.local_size,
        )
        for name, split in (("train", settled.source.train), ("val", settled.source.val), ("test", settled.source.test))
    }
    train = loaders["train"]
    assert train is not None
    board = stack.enter_context(TensorBoard(folder / "tensorboard")) if world.main else None
    journal = Journal(folder / "journal.jsonl" if world.main else None, [board] if board else [])
    total, done = settled.plan.schedule.total_steps, kept.progress.step
    trace = None
    if config.log.trace_samples:
        most = settled.plan.batches.global_batch
        trace = stack.enter_context(SampleTrace(folder / "samples.jsonl", world, most))
    return Run(
        settled=settled,
        choice=choice,
        world=world,
        task=task,
        kept=kept,
        strategy=_strategy(_compiled(kept.model, config.model.compile, device), choice, world, config),
        precision=precision,
        train=train,
        val=loaders["val"],
        test=loaders["test"],
        store=Store(folder / "checkpoints", config.checkpoint.keep),
        journal=stack.enter_context(journal),
        tensorboard=board,
        console=console,
        bar=console.progress(total, done),
        meters=Meters(device_runs_ahead=device.type == "cuda"),
        nonfinite=Nonfinite(config.fault.nonfinite, device, fp16=precision.name == "fp16"),
        stop=stop,
        agreement=Agreement(world),
        trace=trace,
    )


def _task(settled: Settled) -> Task:
    found = plugins.find(settled.task, TASKS, flag="--task")
    task = plugins.call(
        found, {"source": settled.source, "config": settled.config.task}, settled.config.task.args, where="task"
    )
    if not isinstance(task, Task):
        raise RequestError(f"--task {settled.task}: not a subclass of multigpu_cli.tasks.base.Task")
    return task


def _restore(kept: Kept, settled: Settled, world: World) -> None:
    """Rank 0 reads the checkpoint; the others get it from there, so only one machine needs the file."""
    if settled.start.checkpoint:
        path = Path(settled.start.checkpoint)
        state: dict[str, Any] = decided(world, lambda: Checkpoint(path, read_manifest(path)).state())
        kept.restore(state, settled.start.checkpoint)
        if not settled.same_length:  # more epochs are a new chance for a run that had stopped early
            kept.progress.stopped_early, kept.progress.stale_epochs = False, 0


def _strategy(model: nn.Module, choice: Choice, world: World, config: Config) -> Strategy:
    if config.reproducibility.exact:
        return Exact(model, world)
    if choice.strategy == "dp":
        return DataParallel(model, choice.devices)
    if choice.strategy == "ddp":
        return Distributed(model, world, config.communication)
    return Single(model)


def _compiled(model: nn.Module, wanted: str, device: torch.device) -> nn.Module:
    if wanted == "off":
        return model
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "c++", "clang++"))):
        raise RequestError(f"--compile {wanted} on CPU needs a C++ compiler, and there is none", remedy="--compile off")
    return torch.compile(model, mode=None if wanted == "default" else wanted)  # type: ignore[return-value]
