"""Forward and backward of one micro-batch: for training, and observed for its arithmetic and its memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from multigpu_cli.data.loader import Batch
from multigpu_cli.run.learner import Learner, first_batch
from multigpu_cli.runtime.preserve import preserve_buffers


class Observer(Protocol):
    """What is told how far a micro-batch has come, and changes nothing."""

    def phase(self, name: str, batch: Batch | None = None) -> None:
        """What begins: "forward", "backward", or "last backward" where gradients are reduced meanwhile."""

    def backward_done(self, parameters: list[Tensor]) -> None:
        """`.grad` has this micro-batch's share."""


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


def forward_backward(
    learner: Learner, batch: Batch, divisor: float, *, last: bool, observer: Observer | None = None
) -> Tensor:
    """Add one micro-batch's share of the step's gradient to `.grad`; returns its loss sum, ().

    Args:
        divisor: what the step's loss is the mean over: samples, or other units, of the global batch.
        last: of this worker in the step, so gradients are reduced during its backward pass.
    """
    strategy, precision = learner.strategy, learner.kept.precision
    if observer:
        observer.phase("forward", batch)
    with strategy.accumulating(last=last):
        with precision.autocast():
            loss = learner.task.loss_sum(strategy.callable, batch)
        if observer:
            observer.phase("last backward" if last else "backward", batch)
        precision.backward(loss, strategy.loss_factor / divisor)
    if observer:
        observer.backward_done(learner.trained)
    return loss.detach()


@dataclass(frozen=True)
class Traced:
    """What one micro-batch takes.

    Attributes:
        samples: in the micro-batch.
        flops: forward and backward, of matrix products, convolutions and attention; a multiplication with its addition
            counts two. What checkpointed blocks compute a second time is not in it.
        activations: bytes that forward keeps for backward, beside parameters, buffers and inputs.
    """

    samples: int
    flops: int
    activations: int

    @property
    def flops_per_sample(self) -> float:
        return self.flops / self.samples


def traced(learner: Learner, size: int) -> Traced:
    """Run the first micro-batch of so many samples; weights, buffers and gradients are left as they were."""
    model = learner.kept.model
    batch = first_batch(learner.loaders.train, min(size * learner.strategy.lanes, learner.loaders.train.size))
    known = {_place(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    known |= {_place(tensor) for tensor in (batch.inputs, batch.targets) if isinstance(tensor, Tensor)}
    activations: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _place(tensor) not in known:
            activations[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with preserve_buffers(model), _Counter() as counter, saved_tensors_hooks(pack, _as_it_is):
        forward_backward(learner, batch, 1.0, last=False, observer=counter)
    model.zero_grad(set_to_none=True)
    return Traced(len(batch.indices), counter.get_total_flops(), sum(activations.values()))


class _Counter(FlopCounterMode):
    """Counts what a model computes, without what checkpointed blocks compute again.

    From the moment that backward begins, autograd's own work runs with gradients disabled, and only a forward that is
    repeated (torch.utils.checkpoint, or a user's autograd function) has them enabled.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self._in_backward = False
        self.flop_registry = {name: partial(self._counted, flops_of) for name, flops_of in self.flop_registry.items()}

    def phase(self, name: str, batch: Batch | None = None) -> None:
        self._in_backward = name != "forward"

    def backward_done(self, parameters: list[Tensor]) -> None:
        """Everything is counted."""

    def _counted(self, flops_of: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        return 0 if self._in_backward and torch.is_grad_enabled() else flops_of(*args, **kwargs)


def _as_it_is(tensor: Any) -> Any:
    return tensor


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
