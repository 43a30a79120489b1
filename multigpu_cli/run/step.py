"""Forward and backward of one micro-batch, and the FLOPs and kept activations of one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from multigpu_cli.data.loader import Batch, first_batch
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.runtime.module_state import preserve_buffers


class Observer(Protocol):
    """Follows a micro-batch through forward and backward, and changes nothing."""

    def phase(self, name: str, samples: Tensor, /) -> None:
        """A phase begins, with (n,) sample numbers: forward, backward, or last backward, which reduces gradients."""

    def backward_done(self, gradients: Callable[[], list[Tensor]]) -> None:
        """The gradients of this worker, which the function lists, have this micro-batch's share."""


def forward_backward(
    components: TrainComponents, batch: Batch, divisor: float, *, last: bool, observer: Observer | None = None
) -> Tensor:
    """Add one micro-batch's share of the step's gradient to `.grad`; returns its loss sum, ().

    The `divisor` is the number of loss units of the global batch. A worker's last backward pass in a step reduces.
    """
    strategy, precision = components.strategy, components.state.precision
    if observer:
        observer.phase("forward", batch.sample_indices)
    with strategy.accumulate(last=last):
        with precision.autocast_of_pass:
            loss = (components.after_step or components.task).loss_sum(strategy.callable, batch)
        if observer:
            observer.phase("last backward" if last else "backward", batch.sample_indices)
        precision.backward(loss, strategy.loss_factor / divisor)
    if observer:
        observer.backward_done(strategy.local_gradients)
    return loss.detach()


@dataclass(frozen=True)
class MicroBatchProfile:
    """FLOPs and memory of one micro-batch.

    `flops` are those of forward and backward, in matrix products, convolutions and attention; a multiply-add counts as
    two. The second forward pass of checkpointed blocks is not counted.
    """

    samples: int  # in the micro-batch
    flops: int
    activations: int  # bytes that forward saves for backward, beside parameters, buffers and inputs

    @property
    def flops_per_sample(self) -> float:
        return self.flops / self.samples


def profile_micro_batch(components: TrainComponents, size: int) -> MicroBatchProfile:
    """Run a micro-batch of `size` samples; weights and buffers stay as they were, gradients are cleared."""
    model = components.state.model
    batch = first_batch(components.loaders.train, size * components.strategy.replicas_per_process)
    known = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    known |= {_storage(leaf) for leaf in tree_leaves((batch.inputs, batch.targets)) if isinstance(leaf, Tensor)}
    activations: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            activations[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        flops = _count_flops(components, batch)
    return MicroBatchProfile(len(batch.sample_indices), flops, sum(activations.values()))


def count_flops_per_sample(components: TrainComponents) -> float:
    """Count as `MicroBatchProfile.flops_per_sample` does, also of a sharded model, whose ranks call it together.

    Two samples stand for a micro-batch, which may fit into memory only compiled, and counting runs uncompiled. If
    samples are texts of several lengths, FLOPs count as proportional to the tokens of the first micro-batch.
    """
    size, replicas = components.plan.batches.micro_batch, components.strategy.replicas_per_process
    two, all_samples = (first_batch(components.loaders.train, each * replicas) for each in (min(2, size), size))
    tokens = [batch.tokens.places if batch.tokens else len(batch) for batch in (two, all_samples)]
    return _count_flops(components, two) / tokens[0] * tokens[1] / len(all_samples)


def _count_flops(components: TrainComponents, batch: Batch) -> int:
    model = components.state.model
    with preserve_buffers(model), _FlopCounter() as counter:
        forward_backward(components, batch, 1.0, last=False, observer=counter)
    model.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


class _FlopCounter(FlopCounterMode):
    """Counts FLOPs, without those that checkpointed blocks repeat.

    Once backward has begun, autograd runs with gradients disabled; only a repeated forward pass
    (torch.utils.checkpoint, or a user's autograd function) has them enabled.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self._in_backward = False
        self.flop_registry = {name: partial(self._counted, flops_of) for name, flops_of in self.flop_registry.items()}

    def phase(self, name: str, batch: Batch | None = None) -> None:
        self._in_backward = name != "forward"

    def backward_done(self, gradients: Callable[[], list[Tensor]]) -> None:
        """Nothing to do."""

    def _counted(self, flops_of: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        return 0 if self._in_backward and torch.is_grad_enabled() else flops_of(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
