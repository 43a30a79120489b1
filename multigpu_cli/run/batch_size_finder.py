"""Finds a micro-batch that fits into memory before the first step, and a smaller one after out of memory in a step.

A micro-batch runs forward and backward without communication, and its gradients are thrown away; then the ranks vote.
Out of memory on one rank in the middle of a reduction could not be survived: the others would wait for it for ever.
A batch of an evaluation is tried in the same way.
"""

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from multigpu_cli.checkpoint.lock import fail_on_write_error
from multigpu_cli.checkpoint.run_folder import write_note
from multigpu_cli.errors import OutOfMemory, RequestError, TrainingError
from multigpu_cli.run.build import TrainComponents, first_batch
from multigpu_cli.run.forward_backward import forward_backward
from multigpu_cli.run.spec import with_measured_batch, with_micro_batch
from multigpu_cli.runtime.out_of_memory import free_memory
from multigpu_cli.runtime.preserve_module_state import eval_mode, preserve_buffers
from multigpu_cli.runtime.rank_errors import run_on_all_ranks
from multigpu_cli.tasks.base import Task

if TYPE_CHECKING:
    from multigpu_cli.run.run_state import Run

_MOST_WITHOUT_GPU = 256  # where memory has no edge that can be felt, a larger micro-batch gains nothing
_REMEDY = "a smaller --batch-size (with the same --global-batch-size), --grad-checkpointing, or --amp bf16"


def probe_memory(components: TrainComponents) -> list[str]:
    """Find the micro-batch that this run can use, and put it into the plan; what went wrong on the way, in words.

    Raises:
        TrainingError: not even one sample fits, or the policy is to stop.
    """
    first = components.strategy.reduces_first
    if first:
        warm_up(components)
    notes = [*_choose_micro_batch(components), *_probe_evaluation(components)]
    if not first:
        warm_up(components)
    return notes


def warm_up(components: TrainComponents) -> None:
    """Let the strategy do what it has to before the first step, with two samples, which fit where a micro-batch does.

    Raises:
        OutOfMemory: they do not, and it had to be done first.
    """
    size = min(2, components.plan.batches.micro_batch, components.loaders.train.size)

    def loss() -> Tensor:
        with components.state.precision.autocast():
            return components.task.loss_sum(components.strategy.callable, first_batch(components.loaders.train, size))

    with preserve_buffers(components.state.model):
        components.strategy.warm_up(lambda: run_on_all_ranks(components.world, loss))


def measure_peak_memory(components: TrainComponents) -> int:
    """Bytes of the GPU that a micro-batch takes, which fits, with what the optimizer will need."""
    model, seen = components.state.model, []

    def work() -> None:
        _run_micro_batch(components, components.plan.batches.micro_batch)
        seen.append(torch.cuda.max_memory_allocated(components.world.device))

    with preserve_buffers(model):
        _fits_on_all_ranks(components, work)
    model.zero_grad(set_to_none=True)
    return seen[0]


def _choose_micro_batch(components: TrainComponents) -> list[str]:
    if components.spec.user_config.batch.size == "auto" and not components.spec.start.manifest:
        _find_largest_micro_batch(components)
        return []
    if smaller := components.spec.start.micro_batch_after_oom:
        components.spec = with_micro_batch(components.spec, smaller)
    _try_shortest_micro_batch(components)
    notes = []
    while not _fits_in_memory(components, components.plan.batches.micro_batch):
        notes.append(halve_micro_batch(components))
    return notes


def _probe_evaluation(components: TrainComponents) -> list[str]:
    """A task that evaluates in a way of its own has no batches to try."""
    loader = components.loaders.val if components.loaders.val is not None else components.loaders.test
    notes: list[str] = []
    if loader is None or type(components.task).evaluate is not Task.evaluate:
        return notes

    def evaluate_a_batch() -> None:
        model, batch = components.state.eval_model(), first_batch(loader, min(components.eval_batch, loader.size))
        with preserve_buffers(model), eval_mode(model), components.state.precision.autocast():
            components.task.measure(model, batch)

    while not _fits_on_all_ranks(components, evaluate_a_batch):
        notes.append(halve_eval_batch(components))
    return notes


def _try_shortest_micro_batch(components: TrainComponents) -> None:
    """An epoch may end with a micro-batch of one sample, and BatchNorm over single features can't train on one."""
    batches = components.plan.batches
    if components.strategy.replicas_per_process == 1 and batches.smallest_micro_batch == 1 < batches.micro_batch:
        try:
            _fits_in_memory(components, 1)
        except ValueError as error:
            raise RequestError(
                f"an epoch ends with one sample; --model {components.spec.model} can't train on it: {error}",
                remedy="--drop-last, or a --batch-size that leaves more than one over",
            ) from error


def halve_micro_batch(components: TrainComponents) -> str:
    """Halve the micro-batch; the global batch, and so the gradient, stay as they are.

    Raises:
        TrainingError: it can't be halved, or must not be.
    """
    size = components.plan.batches.micro_batch
    acting = {"whole groups of environments": components.spec.source.fixed_batch_sizes is not None}
    _check_may_halve(components, size, f"with micro-batches of {size}", acting)
    components.spec = with_micro_batch(components.spec, size // 2)
    kinds = {type(m).__name__ for m in components.state.model.modules() if isinstance(m, _BatchNorm | _DropoutNd)}
    text = f"out of memory: micro-batches of {size // 2} instead of {size}, the same global batch"
    return text + (f"; smaller micro-batches for {' and '.join(sorted(kinds))} too" if kinds else "")


def halve_eval_batch(components: TrainComponents) -> str:
    """Halve the batches of evaluations, whose figures are sums over samples and stay the same, to rounding.

    Raises:
        TrainingError: they can't be halved, or must not be.
    """
    size, own = components.eval_batch, type(components.task).evaluate is not Task.evaluate
    _check_may_halve(components, size, f"in an evaluation with batches of {size}", {"the task's own evaluation": own})
    components.loaders.max_eval_batch = size // 2
    return f"out of memory in an evaluation: batches of {size // 2} instead of {size}"


def _check_may_halve(components: TrainComponents, size: int, what: str, reasons: dict[str, bool]) -> None:
    """Raises TrainingError with the first reason that holds."""
    config = components.config
    reasons = {
        "--on-oom stop": config.fault.on_oom == "stop",
        "one sample": size == 1,
        "--exact": config.reproducibility.exact,
    } | reasons
    if why := next((reason for reason, holds in reasons.items() if holds), None):
        raise TrainingError(f"out of memory {what} ({why})", remedy=_REMEDY)


def _find_largest_micro_batch(components: TrainComponents) -> None:
    """--batch-size auto: double until something does not fit, or a micro-batch is a worker's whole share."""
    batches = components.plan.batches
    share = components.config.batch.global_size or components.loaders.train.size
    limit = max(1, -(-share // batches.workers))
    limit = min(limit, components.spec.start.micro_batch_after_oom or limit)
    if components.world.device.type != "cuda":
        limit = min(limit, _MOST_WITHOUT_GPU)
    size, best = _find_smallest_micro_batch(components), 0
    while size <= limit and _fits_in_memory(components, size):
        size, best = size * 2, size
    if not best:
        raise TrainingError("--batch-size auto: out of memory with a single sample", remedy=_REMEDY)
    reason = f"measured: {size} does not fit" if size <= limit else "the largest that is of use here"
    components.spec = with_measured_batch(components.spec, best, components.world, reason)
    _try_shortest_micro_batch(components)


def _find_smallest_micro_batch(components: TrainComponents) -> int:
    """Two samples where BatchNorm over single features can't train on one; another ValueError comes again with two."""
    try:
        _fits_in_memory(components, 1)
    except ValueError:
        return 2
    return 1


def _fits_in_memory(components: TrainComponents, size: int) -> bool:
    """Whether every rank can run forward and backward with so many samples, beside the optimizer's state."""
    model = components.state.model
    with preserve_buffers(model):
        fits = _fits_on_all_ranks(components, lambda: _run_micro_batch(components, size))
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] if fits else []
    model.zero_grad(set_to_none=True)
    if unused and components.strategy.name == "ddp" and not components.config.communication.find_unused_parameters:
        names = ", ".join(unused[:4]) + (" …" if len(unused) > 4 else "")
        raise RequestError(
            f"--model {components.spec.model}: {names} took no part in the loss, and DDP waits for every gradient",
            remedy="--find-unused-parameters, or --freeze them",
        )
    return fits


def _fits_on_all_ranks(components: TrainComponents, work: Callable[[], None]) -> bool:
    """Whether no rank runs out of memory in it, beside the state that the optimizer will have."""

    def work_beside_the_state() -> None:
        _reserved = [] if components.state.optimizer.state else _reserve_optimizer_state(components)
        work()

    try:
        run_on_all_ranks(components.world, work_beside_the_state)
    except OutOfMemory:
        return False
    finally:
        free_memory(components.world.device)
    return True


def _run_micro_batch(components: TrainComponents, size: int) -> None:
    """Twice on a GPU: in the second pass the first one's gradients take their room, as in accumulation."""
    batch = first_batch(
        components.loaders.train, min(size * components.strategy.replicas_per_process, components.loaders.train.size)
    )
    for _ in range(2 if components.world.device.type == "cuda" else 1):
        forward_backward(components, batch, 1.0, last=False)


def _reserve_optimizer_state(components: TrainComponents) -> list[Tensor]:
    """What the optimizer will allocate at its first step: two tensors for each parameter (Adam)."""
    if components.world.device.type != "cuda":
        return []
    return [torch.empty_like(p) for p in components.trainable_parameters for _ in range(2)]


def recover_from_out_of_memory(run: "Run", error: RuntimeError) -> None:
    """A step ran out of memory: forget it, and go on with micro-batches of half the size.

    With several processes the others are in the middle of a reduction by now, and from the optimizer on the weights may
    have moved already, in part. So the run has to start again: the next attempt finds the note that is left in the
    folder.

    Args:
        error: its traceback holds what the step had in memory, and gives it up here.

    Raises:
        TrainingError: one of these, or nothing left to halve.
    """
    moved = run.observer.watchdog.phase == "optimizer"
    run.strategy.abort_step()
    run.state.optimizer.zero_grad(set_to_none=True)
    traceback.clear_frames(error.__traceback__)
    free_memory(run.world.device)
    text = halve_micro_batch(run)
    if run.world.size == 1 and not moved:
        run.log_fault("out of memory", text)
        return
    with fail_on_write_error(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)  # on a node that has no part of it yet
        batches = run.plan.batches
        write_note(run.folder, {"batch_size": batches.micro_batch, "global_batch_size": batches.global_batch})
    who = f"rank {run.world.rank} ran out of memory" if run.world.size > 1 else "out of memory"
    raise TrainingError(
        f"{who}{' in the optimizer' if moved else ''} at step {run.progress.step}",
        remedy=f"run the same command again: it goes on from the last checkpoint with {text.split(': ')[1]}",
    )
