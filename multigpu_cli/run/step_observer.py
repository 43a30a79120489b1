"""Everything that observes a training step without changing it, in one place and one order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from multigpu_cli.data.loader import Batch
from multigpu_cli.faults.skipped_step_limit import SkippedStepLimit
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.meters import StepTimer
from multigpu_cli.monitor.noise_scale import NoiseMeter
from multigpu_cli.monitor.sample_trace import SampleTrace
from multigpu_cli.planning.batch import StepLayout
from multigpu_cli.run.loss_meter import LossMeter
from multigpu_cli.run.step_result import StepResult


@dataclass
class StepObserver:
    """Hang watchdog, clocks, gradient noise scale, skipped steps, loss, sample trace.

    A step calls four verbs: `fetch`, `phase`, `backward_done` and `step_done`.
    """

    watchdog: Watchdog
    timer: StepTimer
    noise: NoiseMeter
    nonfinite: SkippedStepLimit
    loss: LossMeter
    trace: SampleTrace | None
    _tokens: tuple[int, int] = field(init=False, default=(0, 0))  # without and with padding, since they were asked for
    _layout: StepLayout = field(init=False)
    _indices: list[Tensor] = field(init=False)  # of this step's batches so far

    def fetch(self, layout: StepLayout, work: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
        """Yield this worker's micro-batches, and whether each is its last in the step; measures the wait for each."""
        self._layout, self._indices = layout, []
        for left in range(len(layout.passes) - 1, -1, -1):
            self.phase("fetching data")
            with self.timer.measure_wait("data_wait"):
                batch = next(work)
            self._indices.append(batch.sample_indices)
            if batch.tokens:
                real, places = self._tokens
                self._tokens = real + batch.tokens.real, places + batch.tokens.places
            yield batch, left == 0

    def take_tokens(self) -> tuple[int, int]:
        """This worker's tokens since the last call, without and with padding; none where nobody counts them."""
        tokens, self._tokens = self._tokens, (0, 0)
        return tokens

    def phase(self, name: str, batch: Batch | None = None) -> None:
        """Report this rank's position to the watchdog."""
        self.watchdog.set_position(self._layout.step, name, None if batch is None else batch.sample_indices)

    def backward_done(self, gradients: Callable[[], list[Tensor]]) -> None:
        """The gradients, which the function lists, are the sum of this worker's micro-batches so far."""
        if self.noise.is_due(self._layout.step + 1, len(self._layout.passes), len(self._indices)):
            self.noise.record_gradient(gradients())

    def step_done(self, outcome: StepResult, units: Tensor | int) -> None:
        """The optimizer has stepped, or skipped the step; `units` is the step's loss units over all workers."""
        step = self._layout.step
        counted = isinstance(units, int) or units > 0  # a step without units is skipped too, and no fault
        self.nonfinite.record(step, outcome.skipped if counted is True else outcome.skipped * counted)
        self.loss.add(step, outcome.micro_batches, outcome.losses, units)
        if self.trace:
            self.trace.write(step + 1, self._indices)
