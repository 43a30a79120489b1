"""Forward and backward of one micro-batch."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from multigpu_cli.data.loader import Batch
from multigpu_cli.run.components import TrainComponents


class Observer(Protocol):
    """Follows a micro-batch through forward and backward, and changes nothing."""

    def phase(self, name: str, batch: Batch | None = None) -> None:
        """A phase begins: "forward", "backward", or "last backward", in which gradients are reduced."""

    def backward_done(self, gradients: Callable[[], list[Tensor]]) -> None:
        """The gradients of this worker, which the function lists, have this micro-batch's share."""


def forward_backward(
    components: TrainComponents, batch: Batch, divisor: float, *, last: bool, observer: Observer | None = None
) -> Tensor:
    """Add one micro-batch's share of the step's gradient to `.grad`; returns its loss sum, ().

    Args:
        divisor: the number of samples, or other loss units, of the global batch.
        last: the worker's last micro-batch in the step: gradients are reduced during its backward pass.
    """
    strategy, precision = components.strategy, components.state.precision
    if observer:
        observer.phase("forward", batch)
    with strategy.accumulate(last=last):
        with precision.autocast():
            loss = components.task.loss_sum(strategy.callable, batch)
        if observer:
            observer.phase("last backward" if last else "backward", batch)
        precision.backward(loss, strategy.loss_factor / divisor)
    if observer:
        observer.backward_done(strategy.local_gradients)
    return loss.detach()
