"""FSDP2 (`fully_shard`): each process holds some rows of every weight, of its gradient and of the optimizer's state.

The weights of a block are gathered when a pass reaches it, and freed after it, so each pass of the model communicates,
on all workers alike. A worker with fewer micro-batches than others therefore runs padding passes, times zero.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.runtime.collectives import all_gather_object, all_reduce_sum
from multigpu_cli.runtime.world import World
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.strategies.check_elementwise import check_is_elementwise
from multigpu_cli.strategies.direct_use import find_direct_use
from multigpu_cli.strategies.sharded_state import ShardedState

_MARKS = 2**16  # their squares, summed over a thousand workers, are whole numbers in float64


class Sharded(Strategy):
    """FSDP2 over the process group; gradients are summed, since losses are divided by the global count already.

    The optimizer works on this rank's rows as ordinary tensors: fused kernels take no DTensors.

    Args:
        model: whole, and the same on every rank; it is sharded in place.
        optimizer: over the model's parameters; it is given the rows in their place.
        average: a copy of the model, such as its exponential moving average; sharded alike.
        blocks: the names of modules whose weights are gathered as one, inner ones first; the rest is one more.
        keeps_weights: gathered weights are kept until the step's last backward pass: less traffic, more memory.

    Raises:
        RequestError: the weights can't be divided, or the optimizer needs whole ones.
    """

    name = "fsdp"
    sharded = True
    keeps_casts = False
    reduces_each_pass = False

    def __init__(
        self,
        model: nn.Module,
        world: World,
        optimizer: torch.optim.Optimizer,
        average: nn.Module | None = None,
        *,
        blocks: Sequence[str] = (),
        keeps_weights: bool = False,
    ) -> None:
        super().__init__(model, world)
        _check_can_be_sharded(model)
        check_is_elementwise(optimizer)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._keeps_weights = keeps_weights
        mesh = DeviceMesh.from_group(cast(dist.ProcessGroup, dist.group.WORLD), world.device.type)
        _shard(model, mesh, blocks, frees_after_forward=not keeps_weights)
        if average is not None:  # it has no backward pass, which would free what it keeps
            _shard(average, mesh, blocks, frees_after_forward=True)
        self._model = cast(FSDPModule, model)
        parameters = {name: cast(DTensor, p) for name, p in model.named_parameters(remove_duplicate=False)}
        rows = {
            name: nn.Parameter(p.detach().to_local(), p.requires_grad)  # type: ignore[attr-defined]
            for name, p in model.named_parameters()
        }
        moved = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        self._state = ShardedState(world, parameters, [parameters[name] for name in moved])
        self._blocks, self._parameters = blocks, parameters
        self._pairs = [(parameters[name], rows[name]) for name in rows if rows[name].requires_grad]
        self.trained = [row for _, row in self._pairs]
        self._give_rows(optimizer, {parameter: rows[name] for parameter, name in names.items()})
        self._rounds = self._done = 0  # passes of each worker in the step, and those that this one has begun
        self._order = 0  # a hash of which blocks have run, one after the other
        for place, block in enumerate(blocks):
            model.get_submodule(block).register_forward_pre_hook(partial(self._note_pass, place))

    def _note_pass(self, place: int, *_: object) -> None:
        self._order = hash((self._order, place))

    def _give_rows(self, optimizer: torch.optim.Optimizer, rows: dict[Tensor, nn.Parameter]) -> None:
        """Put the rows, and their part of the state, in place of whole parameters."""
        for group in optimizer.param_groups:
            group["params"] = [rows[parameter] for parameter in group["params"]]
        for parameter in list(optimizer.state):
            state = optimizer.state.pop(parameter)
            optimizer.state[rows[parameter]] = {
                key: self._state.take_rows(value) if isinstance(value, Tensor) and value.ndim else value
                for key, value in state.items()
            }

    def warm_up(self, loss: Callable[[], Tensor]) -> None:
        """Keep the pass, which every worker can run at any time, as the padding pass."""
        self._padding = loss
        for module in self._model.modules():  # type: ignore[attr-defined]
            # From here on, since what the pass before it finds without a gradient is refused: a worker whose
            # micro-batches do not use a weight sends zeros, or workers would send unlike lengths. Not in torch 2.8.
            if isinstance(module, FSDPModule) and hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True)
        with torch.no_grad():
            loss()  # fetches its samples while no loader is at work

    def explain_failure(self, error: Exception, loss: Callable[[], Tensor]) -> None:
        if "DTensor" not in str(error):
            return
        name = find_direct_use(loss, {parameter: name for name, parameter in self._parameters.items()})
        if block := next((block for block in self._blocks if name.startswith(f"{block}.")), ""):
            raise RequestError(
                f"--multi-gpu fsdp: the model uses {name} without a call of {block}, in which alone it is gathered",
                remedy=f"call {block}, or --set strategy.wrap=… that does not match {block}: what is in no block is "
                "gathered for the whole pass",
            ) from error

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        self._rounds, self._done = -(-micro_batches // self._world.size), 0

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """The last pass is that of all workers; outside of a step each pass is by itself."""
        self._done += 1
        last = self._done >= self._rounds
        self._model.set_requires_gradient_sync(last or self.reduces_each_pass)
        if self._keeps_weights:
            self._model.set_reshard_after_backward(last)
        yield

    def reduce_gradients(self, *, idle: bool) -> None:
        while self._done < self._rounds:
            with self.accumulate(last=False):
                (self._padding() * 0).backward()
            self._end_padding_pass()
        self._rounds = 0
        summed = self._finish_sums()
        for parameter, row in self._pairs:
            gradient, parameter.grad = cast(DTensor | None, parameter.grad), None
            row.grad = None if gradient is None else gradient.to_local()
        self._buffers.apply_mean_change(summed)

    def _end_padding_pass(self) -> None:
        self._buffers.abort_step()  # what this pass alone has changed

    def _finish_sums(self) -> list[Tensor] | None:
        """Complete the gradients; returns the changes of floating buffers if they are summed by now."""
        return None

    def total_norm(self, local: Tensor) -> Tensor:
        """The norm (); NaN, so that the step is skipped, if workers ran different blocks since the start."""
        square, mark = local.double().square(), self._order % _MARKS
        sent = [square, square.new_full((), mark), square.new_full((), mark**2)]
        total, marks, squares = all_reduce_sum(self._world, torch.stack(sent))
        norm = total.sqrt().to(local.dtype)
        return torch.where(marks.square() == squares * self._world.size, norm, torch.nan)  # only if all are equal

    def check_passes(self) -> None:
        if len(set(all_gather_object(self._world, self._order))) > 1:
            raise TrainingError(
                "the workers ran different blocks of the model, so that one gathered the weights of another's block",
                remedy="--set strategy.wrap=… names only modules that every pass runs, or use --multi-gpu ddp",
            )

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        self.check_passes()
        return self._state.gather(state)

    def scatter_state(self, state: dict[str, Any] | None, *, source: int = 0) -> dict[str, Any]:
        return self._state.scatter(state, source)


def _shard(model: nn.Module, mesh: DeviceMesh, blocks: Sequence[str], *, frees_after_forward: bool) -> None:
    """Shard in place: each block by itself, and the rest of the model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # rows are cut along the first dim
    for module in [*map(model.get_submodule, blocks), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=frees_after_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # neither setting reaches the modules inside
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _check_can_be_sharded(model: nn.Module) -> None:
    """Whether `fully_shard` takes the parameters.

    Raises:
        RequestError: names the first that it does not take.
    """
    parameters = dict(model.named_parameters())
    if scalar := next((name for name, parameter in parameters.items() if not parameter.ndim), None):
        raise RequestError(
            f"--multi-gpu fsdp: {scalar} is a parameter without dimensions, which can't be divided into rows",
            remedy="make it one of shape (1,), or use --multi-gpu ddp",
        )
    learning = {parameter.dtype for parameter in parameters.values() if parameter.requires_grad}
    if len(learning) > 1:
        raise RequestError(
            f"--multi-gpu fsdp: the parameters have several formats: {', '.join(sorted(map(str, learning)))}",
            remedy="one format for all that learn, or --multi-gpu ddp",
        )
