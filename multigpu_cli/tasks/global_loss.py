"""A loss over the global batch, whatever the number of workers and the size of the micro-batches: contrastive losses.

Such a loss is not a sum over samples, but a function of a few numbers for each sample, its row. Gradient caching: each
micro-batch first runs forward only; all rows, in the order of the micro-batches, give the loss and its gradient at the
rows, the same on every rank; then each micro-batch runs again, with the same random numbers, and takes the gradient at
its rows back through the model. Gao, Zhang, Han and Callan, "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup", RepL4NLP 2021.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from multigpu_cli.data.collate import describe_shapes
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.order import EVAL_EPOCH
from multigpu_cli.distributed.world import World, add_disjoint, all_reduce_sum
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.precision import at_least_float32
from multigpu_cli.runtime.seeding import seed_loss

Rows = Any  # a tensor (n, …), or a tuple or mapping of such: one row for each of n samples
Model = Callable[..., Any]
Columns = list[Tensor | None]  # the tensors of rows and then of targets, (n, …) each; None for targets that are missing


class _Outline(NamedTuple):
    """The structure of rows and targets, with an empty tensor (0, …) on the CPU in place of each column."""

    specs: tuple[TreeSpec, TreeSpec]  # of rows and of targets
    num_rows: int  # columns of rows; the others are of targets
    columns: Columns


class _Share(NamedTuple):
    """The part of the gradient of a global batch that belongs to one micro-batch."""

    loss: Tensor  # (), of the global batch
    samples: int  # in the global batch
    rows: list[Tensor]  # gradient at each floating tensor of the micro-batch's rows
    parameters: list[tuple[Tensor, Tensor]]  # parameters of the model that the loss itself uses, with their gradients


class GlobalLoss:
    """A loss over a global batch; between the two forward passes of a step it holds the gradient at the rows.

    Args:
        rows: model and batch → rows.
        loss: model, rows and targets of all samples → (), the mean over them. The model may be wrapped (DDP).
    """

    def __init__(self, rows: Callable[[Model, Batch], Rows], loss: Callable[[Model, Rows, Any], Tensor]) -> None:
        self._rows, self._loss = rows, loss
        self._outline: _Outline | None = None
        self._shares: dict[int, _Share] = {}  # by index of the micro-batch

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of the rows and targets of a sample; 0 before the first batch."""
        columns = self._outline.columns if self._outline else []
        return sum(c.new_empty(1, *c.shape[1:]).nbytes for c in columns if c is not None)

    def make_columns(self, model: Model, batch: Batch) -> Columns:
        """Run a batch forward; return its rows, in 32 bits or more, and targets.

        RequestError: they do not have one row for each sample, or other rows than the first batch.
        """
        (rows, of_rows), (targets, of_targets) = map(tree_flatten, (self._rows(model, batch), batch.targets))
        num_rows, specs = len(rows), (of_rows, of_targets)
        columns = [at_least_float32(each) if _is_floating(each) else each for each in (*rows, *targets)]
        for number, column in enumerate(columns):
            if (column is None and number >= num_rows) or _has_rows(column, len(batch)):
                continue
            kind, many = "rows" if number < num_rows else "targets", len(batch)
            remedy = f"tensors whose first dimension is the {many} samples; two views of a sample: torch.stack(…, 1)"
            raise RequestError(f"{kind} of {many} samples for a global loss: {describe_shapes(column)}", remedy=remedy)
        if self._outline is None:
            empty = [c if c is None else torch.empty_like(c[:0], device="cpu") for c in columns]
            self._outline = _Outline(specs, num_rows, empty)
        first = self._outline.columns
        if specs != self._outline.specs or not all(map(_fits, columns, first)):
            problem = f"rows and targets for a global loss: {describe_shapes(columns)} after {describe_shapes(first)}"
            raise RequestError(problem, remedy="rows and targets of the same shape for each sample")
        return columns

    def gather(self, world: World, parts: Mapping[int, Columns], samples: int) -> Columns:
        """Return the columns of all ranks, the same on each of them; all ranks call it together.

        `parts` are the columns of this rank by the index of their first sample among the `samples`.
        """
        assert self._outline is not None, "the trial of the first batch runs on every rank"
        gathered: Columns = []
        for number, outline in enumerate(self._outline.columns):
            if outline is None:
                gathered.append(None)
                continue
            column = torch.zeros((samples, *outline.shape[1:]), dtype=outline.dtype, device=world.device)
            for first, columns in parts.items():
                part = columns[number]
                assert part is not None
                column[first : first + len(part)] = part.detach()
            gathered.append(add_disjoint(world, column))
        return gathered

    def find_gradients(self, model: nn.Module, columns: Columns, pieces: Mapping[int, slice]) -> None:
        """Compute the loss, and store the gradient at the rows of this rank's micro-batches, by index, for `loss_sum`.

        The columns are those of the global batch. RequestError: the loss trains a tensor that the model does not have.
        """
        floating = [row.requires_grad_() for row in self._list_floating(columns)]
        with torch.enable_grad():
            loss = self._compute(model, columns)
        inputs = {id(row) for row in floating}
        parameters = [leaf for leaf in _find_leaves(loss) if id(leaf) not in inputs]
        known = {id(parameter) for parameter in model.parameters()} if parameters else set()
        if any(id(parameter) not in known for parameter in parameters):
            problem = "the global loss depends on a trainable tensor that is no parameter of the model"
            raise RequestError(problem, remedy="make it a parameter of the model, which returns it among the rows")
        gradients = torch.autograd.grad(loss, [*floating, *parameters], materialize_grads=True)
        of_parameters = list(zip(parameters, gradients[len(floating) :], strict=True))
        self._shares = {
            index: _Share(loss.detach(), _count(columns), [g[piece] for g in gradients[: len(floating)]], of_parameters)
            for index, piece in pieces.items()
        }

    def loss_sum(self, model: Model, batch: Batch) -> Tensor:
        """(): the loss of the global batch times the samples of this micro-batch, with its part of the gradient.

        Without the first pass of a step, as when a batch is tried, the micro-batch is a global batch by itself.
        """
        share = self._shares.pop(batch.micro_batch_index, None)
        columns = self.make_columns(model, batch)
        if share is None:
            return self._compute(model, columns).double() * len(batch)
        # the loss of a step is divided by its samples, and the gradients here are already those of its mean
        pairs = zip(self._list_floating(columns), share.rows, strict=True)
        parts = [(row * g).sum() * share.samples for row, g in pairs]
        parts += [(parameter * g).sum() * len(batch) for parameter, g in share.parameters]
        surrogate = torch.stack([part.double() for part in parts]).sum()
        # in float64, so that the losses of micro-batches add up to that of the global batch whatever their size
        return share.loss.double() * len(batch) + (surrogate - surrogate.detach())

    def measure(self, model: Model, batch: Batch) -> tuple[Tensor, Columns]:
        """(): the loss of a batch by itself, times its samples, in float64; and its columns in host memory."""
        columns = self.make_columns(model, batch)
        loss = self._compute(model, columns).double() * len(batch)
        return loss, [column if column is None else column.cpu() for column in columns]

    def evaluate(
        self, model: Model, world: World, parts: Mapping[int, Columns], group: int, *, samples: int, seed: int
    ) -> Iterator[float]:
        """Yield, for each `group` of samples in order, its loss times its samples; the last group may be smaller.

        `parts` are the columns of this rank by the index of their first sample. All ranks call it together, and yield
        the same bits.
        """
        for first in range(0, samples, group):
            size = min(group, samples - first)
            own = dict(_cut(parts, first, first + size))
            columns = self.gather(world, own, size)
            seed_loss(seed, EVAL_EPOCH, world.device)
            with torch.no_grad():
                loss = self._compute(model, columns).double() * size
            # rank 0's: ranks that stop early by it have to agree, and GPUs may round differently
            yield float(all_reduce_sum(world, loss if world.is_main else torch.zeros_like(loss)))

    def _list_floating(self, columns: Columns) -> list[Tensor]:
        """Return the columns of rows that have a gradient."""
        assert self._outline is not None
        return [c for c in columns[: self._outline.num_rows] if c is not None and c.is_floating_point()]

    def _compute(self, model: Model, columns: Columns) -> Tensor:
        """(): the loss, without autocast: its gradient in half precision, not scaled, would lose small numbers."""
        assert self._outline is not None
        (of_rows, of_targets), number = self._outline.specs, self._outline.num_rows
        rows, targets = tree_unflatten(columns[:number], of_rows), tree_unflatten(columns[number:], of_targets)
        device = next(column.device for column in columns if column is not None)
        with torch.autocast(device.type, enabled=False):
            loss: Any = self._loss(model, rows, targets)
        if not _is_floating(loss) or loss.ndim:
            problem = f"the global loss returned {describe_shapes(loss)}, not a number ()"
            raise RequestError(problem, remedy="return the mean over all rows: losses.mean(), say")
        return loss  # type: ignore[no-any-return]


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.shape[:1] == (count,)


def _fits(column: Tensor | None, outline: Tensor | None) -> bool:
    """Return whether a column has the dtype, and each of its rows the shape, of the outline."""
    if column is None or outline is None:
        return column is outline
    return column.dtype == outline.dtype and column.shape[1:] == outline.shape[1:]


def _count(columns: Sequence[Tensor | None]) -> int:
    return next(len(column) for column in columns if column is not None)


def _cut(parts: Mapping[int, Columns], first: int, stop: int) -> Iterator[tuple[int, Columns]]:
    """Yield what the parts have of samples first … stop-1, with the index of its first sample in that range."""
    for start, columns in parts.items():
        begin, end = max(start, first), min(start + _count(columns), stop)
        if begin < end:
            cut = slice(begin - start, end - start)
            yield begin - first, [column if column is None else column[cut] for column in columns]


def _find_leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors that autograd would accumulate a gradient of the loss in."""
    found, seen, todo = [], set[Any](), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.append(node.variable)
            todo += [next_node for next_node, _ in node.next_functions]
    return found
