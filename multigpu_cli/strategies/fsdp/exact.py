"""--exact with --multi-gpu fsdp: the same bits as without sharding, on any number of workers.

It is the tree of exact.py, for this worker's rows alone. Each pass reduces: every worker sends the rows of its gradient
to those who hold them, and they add them up. The workers take successive micro-batches in a pass (`BatchPlan.
interleaved`), so the leaves come from left to right, and no more sums wait than the logarithm of their number.

Weights lie in memory as they do without sharding: kernels, and so the last bits, depend on it. FSDP gathers each weight
row by row, with the last dimension contiguous. A kernel with channels last, say, is copied into that layout when its
module runs; until the backward pass is done, the copy is there beside what FSDP frees.

Optimizer steps on rows have the bits of a step on the whole weight. A kernel takes a vector of numbers at a time, and
what is left at the end of a tensor one by one: on a CPU with other rounding (fused AdamW and SGD), on a GPU perhaps.
Rows end elsewhere than the whole. Where their number is not a multiple of any vector's, they are therefore copied for
the step, with zeros around them, into a tensor that ends as the whole does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from multigpu_cli.distributed.world import World, all_gather, all_reduce_sum
from multigpu_cli.errors import RequestError
from multigpu_cli.strategies.exact import ReductionTree
from multigpu_cli.strategies.fsdp.fsdp import FSDP2

Strides = tuple[int, ...]


class WeightLayouts:
    """Remembers the layouts of a model's parameters, whose rows must follow each other, before it is sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.unusual = {  # strides of each that is not laid out by rows, by all of its names
            name: parameter.stride()
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter.stride() != torch.empty(parameter.shape, device="meta").stride()
        }
        for name, strides in self.unusual.items():
            if strides[0] < max(strides):
                problem = f"--exact can't be used with --multi-gpu fsdp: {name} is not stored row by row"
                remedy = "make it .contiguous() where the model is built, or use --multi-gpu ddp"
                raise RequestError(problem, remedy=remedy)

    def restore_in_forward(self) -> None:
        """Let each module find its own weights in their layout while it runs."""
        for name, strides in self.unusual.items():
            owner, _, attribute = name.rpartition(".")
            module = self._model.get_submodule(owner)
            module.register_forward_pre_hook(partial(_lay_out, attribute, strides))
            module.register_forward_hook(partial(_forget, attribute), always_call=True)


def copy_to_layout(tensor: Tensor, strides: Strides | None) -> Tensor:
    """The tensor, as a copy with these strides; None: as it is."""
    if strides is None:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _lay_out(attribute: str, strides: Strides, module: nn.Module, _: object) -> None:
    module.__dict__[attribute] = copy_to_layout(module._parameters[attribute], strides)  # type: ignore[arg-type]


def _forget(attribute: str, module: nn.Module, *_: object) -> None:
    module.__dict__.pop(attribute, None)


_BLOCK = 64  # a multiple of the numbers in any vector, and in two of them, which torch takes at a time


class _Piece(NamedTuple):
    """Where rows lie in their padded copy, with so many numbers before and after."""

    rows: Tensor  # a parameter of the optimizer
    order: tuple[int, ...]  # its dimensions, the outermost in the whole tensor's memory first
    before: int
    after: int

    def pad(self, value: Tensor) -> Tensor:
        """(n,) the rows, or a state of their shape, between zeros."""
        return torch.nn.functional.pad(value.permute(self.order).flatten(), (self.before, self.after))

    def cut(self, padded: Tensor) -> Tensor:
        """A tensor in the shape of the rows, the opposite of `pad`."""
        inner = padded[self.before : self.before + self.rows.numel()]
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return inner.view([self.rows.shape[dim] for dim in self.order]).permute(inverse)


class SimdTails:
    """Pads the rows that need it before each step of an optimizer, and takes the result back after it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._pieces: dict[Tensor, _Piece] = {}
        self._padded: dict[Tensor, _Piece] = {}  # during a step
        optimizer.register_step_pre_hook(self._pad)
        optimizer.register_step_post_hook(self._cut)

    def add(self, rows: Tensor, start: int, whole: int, strides: Strides | None) -> None:
        """Let rows end as their weight does, which has `start` of its `whole` numbers before them."""
        behind = whole - start - rows.numel()
        ends_alike = rows.numel() % _BLOCK == 0 and (behind >= _BLOCK or whole % _BLOCK == 0)
        if rows.numel() and not ends_alike:
            before, after = (0, _BLOCK) if behind >= _BLOCK else (start % _BLOCK, behind)
            order = range(rows.ndim) if strides is None else sorted(range(rows.ndim), key=lambda dim: -strides[dim])
            self._pieces[rows] = _Piece(rows, tuple(order), before, after)

    @torch.no_grad()
    def _pad(self, *_: object) -> None:
        groups = self._optimizer.param_groups
        self._order = dict.fromkeys([*self._optimizer.state, *(rows for group in groups for rows in group["params"])])
        for group in groups:
            group["params"] = [self._pad_parameter(rows) for rows in group["params"]]

    def _pad_parameter(self, rows: Tensor) -> Tensor:
        if (piece := self._pieces.get(rows)) is None:
            return rows
        padded = torch.nn.Parameter(piece.pad(rows))
        padded.grad = None if rows.grad is None else piece.pad(rows.grad)
        if rows in self._optimizer.state:
            state = self._optimizer.state[rows]
            self._optimizer.state[padded] = {
                key: piece.pad(value) if _is_like(value, rows) else value for key, value in state.items()
            }
        self._padded[padded] = piece
        return padded

    @torch.no_grad()
    def _cut(self, *_: object) -> None:
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            group["params"] = [self._cut_parameter(parameter) for parameter in group["params"]]
        for parameter in self._order:  # that of all workers, which gather the state together
            if parameter in state:
                state[parameter] = state.pop(parameter)

    def _cut_parameter(self, padded: Tensor) -> Tensor:
        if (piece := self._padded.pop(padded, None)) is None:
            return padded
        piece.rows.copy_(piece.cut(padded))
        for key, value in self._optimizer.state.pop(padded, {}).items():
            state = self._optimizer.state[piece.rows]  # creates a missing state, but only if the step made one
            if not _is_like(value, padded):
                state[key] = value
            elif key in state:
                state[key].copy_(piece.cut(value))
            else:
                state[key] = piece.cut(value).clone(memory_format=torch.contiguous_format)
        return piece.rows


def _is_like(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


class RowSum:
    """The reduce-scatter of one module, in torch's interface for `FSDPModule.set_custom_reduce_scatter`.

    Each pass of a step brings one leaf of the tree from each worker, in rank order. A module that is called several
    times in a pass reduces as often, each parameter's gradient once and zeros otherwise; together these are the leaf.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._leaves = workers, 0
        self._stream: torch.cuda.Stream | None = None  # FSDP's for reductions, on a GPU
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
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Receive this worker's rows of all workers' gradients; the output is zero until `finish_step`."""
        self._stream = torch.cuda.current_stream() if input_tensor.is_cuda else None
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
            with self._on_its_stream():
                self._push_pass()
        self._calls = 0
        self._passes += 1

    def finish_step(self) -> None:
        """Write the sum into the gradients, if there are any."""
        if self._gradient is not None:
            with self._on_its_stream():
                self._push_zeros()
                self._gradient.copy_(self._tree.total())
        self.begin_step(0)

    @contextmanager
    def _on_its_stream(self) -> Iterator[None]:
        """All of the tree lies on one stream: memory that one frees, it may use again while another still reads it."""
        if self._stream is None:
            yield
            return
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            yield
        before.wait_stream(self._stream)

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


class ExactFSDP2(FSDP2):
    """FSDP2 with gradients summed in a fixed order; parameters without one count as zeros, as without sharding."""

    interleaved = True
    keeps_casts = True  # without sharding the gradient of a weight that is used twice is rounded once, in the cast
    reduces_each_pass = True

    def __init__(self, model: nn.Module, world: World, average: nn.Module | None = None, **settings: Any) -> None:
        layouts, of_average = WeightLayouts(model), average and WeightLayouts(average)
        super().__init__(model, world, average, **settings)
        layouts.restore_in_forward()
        if of_average:
            of_average.restore_in_forward()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._strides = {rows: layouts.unusual.get(names[id(parameter)]) for rows, parameter in self._parts.items()}
        self._sums = [_replace_reduction(part, world) for part in model.modules() if isinstance(part, FSDPModule)]
        self._changes: ReductionTree[list[Tensor]] = ReductionTree(_add)  # of floating buffers

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().attach_optimizer(optimizer)
        tails = SimdTails(optimizer)
        for parameter, rows in self._pairs:
            start = sum(_divide(parameter.shape, self._world.size)[: self._world.rank])
            tails.add(rows, start, parameter.numel(), self._strides[rows])

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        self._micro_batches = micro_batches
        self._changes.nodes.clear()  # of a step that was not finished
        for rows in self._sums:
            rows.begin_step(micro_batches)

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        with super().accumulate(last=last):
            yield
        for rows in self._sums:
            rows.end_pass()

    def after_backward(self, number: int) -> None:
        self._push_changes(self._buffers.take_change(number))

    def reduce_gradients(self, *, idle: bool) -> None:
        super().reduce_gradients(idle=idle)
        for rows in self.local_parameters:
            rows.grad = torch.zeros_like(rows) if rows.grad is None else rows.grad

    def total_norm(self, local: Tensor) -> Tensor:
        """The norm () in the order of one process: each worker computes those of some whole gradients."""
        norms, workers, rank = local.new_zeros(len(self._pairs)), self._world.size, self._world.rank
        for first in range(0, len(norms), workers):
            gradient = self._exchange_gradients(range(first, min(first + workers, len(norms))))
            if gradient is not None:
                norms[first + rank] = torch._foreach_norm([gradient])[0]
        norm, rounded = torch.linalg.vector_norm(all_reduce_sum(self._world, norms)), super().total_norm(local)
        return torch.where(rounded.isnan(), rounded, norm)  # as it is where workers ran different blocks

    def _exchange_gradients(self, places: Sequence[int]) -> Tensor | None:
        """The whole gradient of one of these places on each worker; None on those for which there is none."""
        workers, own = self._world.size, self._world.rank < len(places)
        sent = [cast(Tensor, self.local_parameters[place].grad).flatten() for place in places]
        sizes = [part.numel() for part in sent] + [0] * (workers - len(sent))
        place = places[self._world.rank] if own else 0
        parameter = self._pairs[place][0]
        parts = _divide(parameter.shape, workers) if own else [0] * workers
        whole = sent[0].new_empty(sum(parts))
        dist.all_to_all_single(whole, torch.cat(sent), parts, sizes)
        return copy_to_layout(whole.view(parameter.shape), self._strides[self.local_parameters[place]]) if own else None

    def _finish_sums(self) -> list[Tensor]:
        for rows in self._sums:
            rows.finish_step()
        return self._changes.total()

    def _end_padding_pass(self) -> None:
        super()._end_padding_pass()
        self._push_changes(self._buffers.no_change())

    def _push_changes(self, own: list[Tensor]) -> None:
        """Add what the workers' micro-batches of one pass changed in floating buffers."""
        first = (self._done - 1) * self._world.size
        of_all = [all_gather(self._world, change) for change in own]
        for number in range(first, min(first + self._world.size, self._micro_batches)):
            self._changes.push(0, number, [changes[number - first] for changes in of_all])


def _replace_reduction(module: FSDPModule, world: World) -> RowSum:
    rows = RowSum(world.size)
    module.set_custom_reduce_scatter(rows)  # type: ignore[arg-type]  # it has the methods, and torch keeps the class private
    module.register_forward_pre_hook(rows.note_forward)  # type: ignore[attr-defined]
    return rows


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return [one.add_(other) for one, other in zip(left, right, strict=True)]


def _divide(shape: Sequence[int], workers: int) -> list[int]:
    """How many numbers of a parameter each worker holds, as `fully_shard` divides it."""
    rows = -(-shape[0] // workers)
    return [max(0, min(rows, shape[0] - rank * rows)) * prod(shape[1:]) for rank in range(workers)]
