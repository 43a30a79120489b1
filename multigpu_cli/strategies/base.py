"""What the loop asks of a way to share the work: a few verbs, so that it never asks which one it has."""

from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from multigpu_cli.strategies.buffers import StepBuffers


class Strategy(ABC):
    """Spreads micro-batches over workers, and brings their gradients together.

    A step is: `begin_step`, then for each micro-batch of this worker forward and backward inside `accumulate` and
    `after_backward`, then `finish`. Where each loss was multiplied by `loss_factor`, `.grad` then holds on every rank
    the sum of all workers' gradients: that of the global batch.

    Attributes:
        name: single, dp, ddp or exact.
        replicas_per_process: micro-batches that one forward pass takes in (dp: one for each device).
        loss_factor: what each loss is multiplied by before backward, to undo an average over workers.
        reduces_first: no backward pass without communication may come before `warm_up`.
    """

    name: str
    replicas_per_process: int = 1
    loss_factor: float = 1.0
    reduces_first: bool = False

    def __init__(self, model: nn.Module, workers: int = 1) -> None:
        self.callable: Callable[..., Tensor] = model
        self._buffers = StepBuffers(model, workers, self._all_reduce_sum)

    def warm_up(self, loss: Callable[[], Tensor]) -> None:  # noqa: B027 - most strategies have nothing to do
        """Whatever has to happen before the first step so that a resumed run goes on with the same bits.

        Args:
            loss: forward pass of a few samples that are the same on every rank, and at every start of the run; who
                calls puts the buffers back.
        """

    def begin_step(self, micro_batches: int) -> None:
        """Start a step that has so many micro-batches over all workers."""
        self._buffers.begin_step(micro_batches)

    def accumulate(self, *, last: bool) -> AbstractContextManager[object]:
        """Holds the forward and backward pass of one micro-batch; gradients travel only in the last one."""
        return nullcontext()

    def after_backward(self, number: int) -> None:
        """After the backward pass of micro-batch `number` of the step, counted over all workers."""
        self._buffers.collect()

    def reduce_gradients(self, *, idle: bool) -> None:
        """End the step: whatever has not been reduced is reduced now; an idle worker takes part with zeros."""
        self._buffers.apply_mean_change()

    def rollback_buffers(self, skipped: Tensor) -> None:
        """Put the buffers back where the step began, if the optimizer skipped it: () 1.0 or 0.0, on the device."""
        self._buffers.rollback(skipped)

    def read_comm_wait(self) -> float | None:
        """Mean seconds a step since the last call in which this worker only waited for the reduction; None: unknown."""
        return None

    def abort_step(self) -> None:
        """Forget a step that could not be finished."""
        self._buffers.abort_step()

    def _all_reduce_sum(self, values: Tensor) -> Tensor:
        """The sum over workers, in place."""
        return values
