"""The first forward passes of a step whose loss is over the global batch, and its gradient at their rows."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from multigpu_cli.data.loader import Batch, map_batch
from multigpu_cli.distributed.world import empty_on_host
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import StepLayout
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.run.step import Observer
from multigpu_cli.runtime.module_state import preserve_buffers
from multigpu_cli.runtime.seeding import seed_loss, seed_micro_batch
from multigpu_cli.tasks.base import Task
from multigpu_cli.tasks.global_loss import Columns, GlobalLoss

Work = Iterator[tuple[Batch, bool]]  # micro-batches, and whether each is the worker's last in the step


def check_global_loss(spec: RunSpec, task: Task) -> None:
    """Raise RequestError if a loss over the global batch does not fit other settings."""
    if task.global_loss is None:
        return
    if spec.strategy.sharded:
        reason = "each micro-batch runs forward twice, and sharded weights are gathered for one forward and backward"
        problem = f"--multi-gpu {spec.strategy.name} can't be used with a loss over the global batch: {reason}"
        raise RequestError(problem, remedy="--multi-gpu ddp")
    if spec.config.model.compile == "reduce-overhead":
        reason = "CUDA graphs would overwrite the rows of the first passes"
        problem = f"--compile reduce-overhead can't be used with a loss over the global batch: {reason}"
        raise RequestError(problem, remedy="--compile default, or --compile off")


def find_row_gradients(
    components: TrainComponents, layout: StepLayout, work: Work, observer: Observer | None = None
) -> Work:
    """Run a step's micro-batches forward, find the gradient at all ranks' rows, and yield the micro-batches again.

    All ranks iterate over it together, also those without a micro-batch. Meanwhile the inputs and targets of a GPU are
    in host memory, except those of a worker's only micro-batch.
    """
    global_loss, strategy, world = _get_global_loss(components), components.strategy, components.world
    seed, devices = components.config.reproducibility.seed, components.spec.placement.devices
    size = components.plan.batches.micro_batch * strategy.replicas_per_process
    columns: dict[int, Columns] = {}  # by the index of their first sample
    pieces: dict[int, slice] = {}
    waiting: list[tuple[Batch, bool]] = []
    strategy.synchronize_forward()
    for batch, last in work:
        first, index = batch.micro_batch_index * size, batch.micro_batch_index
        seed_micro_batch(seed, layout.step, index, *devices)
        if observer:
            observer.phase("forward", batch.sample_indices)
        columns[first], pieces[index] = run_first_pass(components, batch), slice(first, first + len(batch))
        is_only = last and not waiting
        waiting.append((batch if is_only else map_batch(batch, _to_host), last))
    strategy.on_gather()
    gathered = global_loss.gather(world, columns, layout.samples)
    seed_loss(seed, layout.step, *devices)
    global_loss.find_gradients(components.state.model, gathered, pieces)
    for batch, last in waiting:
        yield map_batch(batch, partial(Tensor.to, device=world.device, non_blocking=True)), last


def run_first_pass(components: TrainComponents, batch: Batch) -> Columns:
    """Run a batch forward; buffers stay as they were, because the second pass moves them.

    Gradients are enabled, as in the second pass, so that both choose the same kernels: another kernel may draw other
    random numbers. The graph is freed on return.
    """
    strategy, precision = components.strategy, components.state.precision
    with strategy.accumulate(last=False), preserve_buffers(components.state.model), precision.autocast_of_pass:
        columns = _get_global_loss(components).make_columns(strategy.callable, batch)
    return [column if column is None else column.detach().clone() for column in columns]


def rehearse_global_loss(components: TrainComponents, batch: Batch, samples: int) -> None:
    """Prepare the second pass of a micro-batch as a step does, with its rows repeated for a global batch of `samples`.

    This shows memory and time of a step, and whether the loss takes the rows.
    """
    columns, rows = run_first_pass(components, batch), torch.arange(max(samples, len(batch))) % len(batch)
    whole = [column if column is None else column[rows.to(column.device)] for column in columns]
    pieces = {batch.micro_batch_index: slice(0, len(batch))}
    _get_global_loss(components).find_gradients(components.state.model, whole, pieces)


def describe_global_loss(components: TrainComponents) -> str:
    """Return the plan's note about a loss over the global batch, or ""."""
    if components.task.global_loss is None:
        return ""
    samples = components.plan.batches.global_batch
    size = components.task.global_loss.bytes_per_sample * samples / 2**20
    rows = f"of {samples} rows, {size:.3g} MiB and as much for their gradient on each worker"
    return f"{rows}; each micro-batch runs forward twice, which FLOPs and MFU count once"


def _get_global_loss(components: TrainComponents) -> GlobalLoss:
    assert components.task.global_loss is not None
    return components.task.global_loss


def _to_host(tensor: Tensor) -> Tensor:
    """Copy a GPU's tensor to host memory, without a wait: its way back is in the same stream."""
    return empty_on_host(tensor).copy_(tensor, non_blocking=True) if tensor.is_cuda else tensor
