"""The exact sum, over workers and passes, of the gradients of weights that are gathered as one: this worker's rows."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from multigpu_cli.strategies.reduction_tree import ReductionTree


class RowSum:
    """The reduce-scatter of one module, in torch's interface for `FSDPModule.set_custom_reduce_scatter`.

    Each pass of a step brings one leaf of the tree from each worker, in rank order. A module that is called several
    times in a pass reduces as often, each parameter's gradient once and zeros otherwise; together these are the leaf.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._leaves = workers, 0
        self._tree: ReductionTree[Tensor] = ReductionTree(lambda left, right: left.add_(right))
        self._clear()

    def _clear(self) -> None:
        self._passes = self._pushed = self._calls = 0
        self._leaves_at_hand: Tensor | None = None  # (workers, n) of this pass, while more of it may come
        self._gradient: Tensor | None = None  # (n,) of which FSDP makes the step's gradients: they are views of it
        self._tree.nodes.clear()

    def begin_step(self, leaves: int) -> None:
        """Start a step of so many micro-batches over all workers; outside of a step nothing is summed."""
        self._clear()
        self._leaves = leaves

    def note_forward(self, *_: object) -> None:
        """The module is called: one more reduction may come. Its gradients are not whole before the last of them."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # not to recompute activations
            self._calls += 1

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Receive this worker's rows of all workers' gradients; the output is zero until `finish_step`."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.zero_()
        if not self._leaves:
            return
        rows = received.view(self._workers, -1)
        self._gradient = output_tensor if self._gradient is None else self._gradient
        self._leaves_at_hand = rows if self._leaves_at_hand is None else self._leaves_at_hand.add_(rows)
        self._calls -= 1
        if self._calls == 0:
            self._push_pass()

    def end_pass(self) -> None:
        """After the backward pass; not every call of a module need have reduced."""
        if self._leaves_at_hand is not None:
            self._push_pass()
        self._calls = 0
        self._passes += 1

    def finish_step(self) -> None:
        """Write the sum into the gradients, if there are any."""
        if self._gradient is not None:
            self._push_zeros()
            self._gradient.copy_(self._tree.total())
        self.begin_step(0)

    def _push_pass(self) -> None:
        self._push_zeros()
        if self._leaves_at_hand is None or self._pushed > self._passes:
            raise RuntimeError("--exact: FSDP has reduced a module's gradients more often than the module was called")
        self._push(self._leaves_at_hand)
        self._leaves_at_hand = None

    def _push_zeros(self) -> None:
        """For the passes in which the module did not take part."""
        while self._pushed < self._passes:
            assert self._gradient is not None
            self._push(self._gradient.new_zeros(self._workers, len(self._gradient)))

    def _push(self, rows: Tensor) -> None:
        """Add the leaves (workers, n) of one pass; in the last one, some workers may have only been padding it."""
        first = self._pushed * self._workers
        for number, row in enumerate(rows[: self._leaves - first], start=first):
            self._tree.push(0, number, row.clone())  # so that what came from the others can be freed
        self._pushed += 1
