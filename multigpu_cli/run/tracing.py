"""One micro-batch forward and backward under observation: its arithmetic, and what it keeps in memory for backward."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from multigpu_cli.run.learner import Learner, first_batch
from multigpu_cli.runtime.preserve import preserve_buffers


@dataclass(frozen=True)
class Traced:
    """What was seen.

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
    batch = first_batch(learner.train, min(size * learner.strategy.lanes, learner.train.size))
    known = {_place(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    known |= {_place(tensor) for tensor in (batch.inputs, batch.targets) if isinstance(tensor, Tensor)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _place(tensor) not in known:
            kept[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with preserve_buffers(model), _Counter() as counter, saved_tensors_hooks(pack, _as_it_is):
        with learner.strategy.accumulating(last=False), learner.precision.autocast():
            loss = learner.task.loss_sum(learner.strategy.callable, batch)
        counter.in_backward = True
        (loss * 0).backward()
    model.zero_grad(set_to_none=True)
    return Traced(len(batch.indices), counter.get_total_flops(), sum(kept.values()))


class _Counter(FlopCounterMode):
    """Counts what a model computes, without what checkpointed blocks compute again.

    Attributes:
        in_backward: set when backward begins. From then on autograd's own work runs with gradients disabled, and only a
            forward that is repeated (torch.utils.checkpoint, or a user's autograd function) has them enabled.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.in_backward = False
        self.flop_registry = {name: partial(self._counted, flops_of) for name, flops_of in self.flop_registry.items()}

    def _counted(self, flops_of: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        return 0 if self.in_backward and torch.is_grad_enabled() else flops_of(*args, **kwargs)


def _as_it_is(tensor: Any) -> Any:
    return tensor


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
