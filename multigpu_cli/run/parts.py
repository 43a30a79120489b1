"""A run: what learns, and everything that watches over it and writes it down."""

from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from multigpu_cli.checkpoint.lock import needed
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.writer import Writer
from multigpu_cli.faults.nonfinite import Nonfinite
from multigpu_cli.faults.stop import Agreement, StopRequest
from multigpu_cli.faults.watch import Watch
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.journal import Journal
from multigpu_cli.monitor.meters import Meters
from multigpu_cli.monitor.noise_scale import NoiseMeter
from multigpu_cli.monitor.progress import Progress as Bar
from multigpu_cli.monitor.trace import SampleTrace
from multigpu_cli.planning.peaks import peak_flops
from multigpu_cli.run.learner import Learner
from multigpu_cli.run.tally import Tally
from multigpu_cli.runtime.collectives import together
from multigpu_cli.runtime.elastic import Last
from multigpu_cli.tasks.units import Units

if TYPE_CHECKING:
    from multigpu_cli.monitor.gpu import Sampler
    from multigpu_cli.monitor.tensorboard import TensorBoard


@dataclass
class Run(Learner):
    """Everything that a training loop touches."""

    store: Store
    writer: Writer
    journal: Journal
    tensorboard: "TensorBoard | None"
    console: Console
    bar: Bar
    meters: Meters
    units: Units
    nonfinite: Nonfinite
    stop: StopRequest
    agreement: Agreement
    watch: Watch
    trace: SampleTrace | None
    noise: NoiseMeter
    sampler: "Sampler | None"
    flops_per_sample: float | None  # where the device's peak rate is known
    tally: Tally
    saved: int  # the step of the newest checkpoint
    best: dict[str, Tensor] | None = None  # host copy of the best weights, until a checkpoint has written them
    snapshot: dict[str, Any] | None = None  # the state that was written last, or is being written
    best_sent: dict[str, Tensor] | None = None  # those that the checkpoint in flight writes
    best_sum: str = ""  # SHA-256 of the best weights that were written, on rank 0
    unseen: frozenset[tuple[str, int]] = frozenset()  # what NVML does not say of which rank's GPU, as the user knows
    before: Last | None = None  # how the attempt before this one ended, until a step of this one is done

    @property
    def folder(self) -> Path:
        return Path(self.settled.start.folder)

    @property
    def finished(self) -> bool:
        """Whether the planned steps are done, or nothing improves any more."""
        return self.progress.step >= self.plan.schedule.total_steps or self.progress.stopped_early


class Outcome(NamedTuple):
    """What one step has given: numbers that stay on the device until someone looks.

    Attributes:
        micro_batches: of the step, over all workers.
        losses: () loss sums of this worker's micro-batches, by their number in the step.
        norm: () of the global gradient.
        skipped: () 1 where the optimizer skipped the step.
    """

    micro_batches: int
    losses: dict[int, Tensor]
    norm: Tensor
    skipped: Tensor

    def slots(self, device: torch.device) -> Tensor:
        """(micro-batches,) float64: this worker's loss sums in their slots, zeros elsewhere."""
        slots = torch.zeros(self.micro_batches, dtype=torch.float64, device=device)
        for number, loss in self.losses.items():
            slots[number] = loss
        return slots


def assemble(learner: Learner, console: Console, stop: StopRequest, watch: Watch, stack: ExitStack) -> Run:
    """Open journal, TensorBoard and the rest in the run folder, which is already ours; the stack closes them."""
    world, config, plan = learner.world, learner.config, learner.plan
    folder = Path(learner.settled.start.folder)
    board = _board(folder, console, stack) if world.main else None

    def opened() -> tuple[Journal, SampleTrace | None]:
        with needed(folder):
            journal = Journal(folder / "journal.jsonl" if world.main else None, [board] if board else [], console.warn)
            if not config.log.trace_samples:
                return journal, None
            return journal, SampleTrace(folder / "samples.jsonl", world, plan.batches.global_batch, console.warn)

    journal, trace = together(world, opened)
    learner.task.moved = watch.moved
    if trace:
        stack.enter_context(trace)
    for loader in (learner.train, learner.val, learner.test):
        if loader is not None:
            stack.callback(loader.close)
    return Run(
        **{entry.name: getattr(learner, entry.name) for entry in fields(Learner)},
        store=Store(folder / "checkpoints", config.checkpoint.keep, watch.moved),
        journal=stack.enter_context(journal),
        writer=stack.enter_context(Writer()),
        tensorboard=board,
        console=console,
        bar=console.progress(plan.schedule.total_steps, learner.progress.step),
        meters=Meters(device_runs_ahead=world.device.type == "cuda"),
        units=Units(learner.task, world),
        nonfinite=Nonfinite(config.fault.nonfinite, world.device, fp16=learner.precision.name == "fp16"),
        stop=stop,
        agreement=Agreement(world),
        watch=watch,
        trace=trace,
        noise=NoiseMeter(0 if learner.precision.name == "fp16" else config.log.interval, learner.strategy.loss_factor),
        sampler=_sampler(world.device, stack),
        flops_per_sample=_flops(learner),
        tally=Tally(world, learner.progress, plan.batches.steps_per_epoch),
        saved=learner.progress.step,
    )


def _board(folder: Path, console: Console, stack: ExitStack) -> "TensorBoard":
    from multigpu_cli.monitor.tensorboard import TensorBoard  # late: the first rank alone has one

    return stack.enter_context(TensorBoard(folder / "tensorboard", console.warn))


def _sampler(device: torch.device, stack: ExitStack) -> "Sampler | None":
    """Somebody who watches this rank's GPU."""
    if device.type != "cuda":
        return None
    from multigpu_cli.monitor.gpu import Sampler  # late: there is a GPU to watch

    sampler = Sampler(str(torch.cuda.get_device_properties(device).uuid))
    stack.callback(sampler.close)
    return sampler


def _flops(learner: Learner) -> float | None:
    """Counted where something can be made of them; it costs a forward and backward pass."""
    if peak_flops(learner.plan.device, learner.precision.name) is None:
        return None
    from multigpu_cli.run.tracing import traced  # late: torch's counter is needed on a known GPU only

    return traced(learner, learner.plan.batches.micro_batch).flops_per_sample
