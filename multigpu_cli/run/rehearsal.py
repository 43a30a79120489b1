"""Out of memory: found before the first step, on all ranks, and survived later, in smaller micro-batches.

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

from multigpu_cli.checkpoint.lock import needed
from multigpu_cli.checkpoint.run_folder import leave_note
from multigpu_cli.errors import OutOfMemory, RequestError, TrainingError
from multigpu_cli.run.compute import forward_backward
from multigpu_cli.run.learner import Learner, first_batch
from multigpu_cli.run.settle import with_batch, with_measured_batch
from multigpu_cli.runtime.collectives import together
from multigpu_cli.runtime.memory import free_memory
from multigpu_cli.runtime.preserve import evaluating, preserve_buffers
from multigpu_cli.tasks.base import Task

if TYPE_CHECKING:
    from multigpu_cli.run.run import Run

_MOST_WITHOUT_GPU = 256  # where memory has no edge that can be felt, a larger micro-batch gains nothing
_REMEDY = "a smaller --batch-size (with the same --global-batch-size), --grad-checkpointing, or --amp bf16"


def rehearse(learner: Learner) -> list[str]:
    """Find the micro-batch that this run can use, and put it into the plan; what went wrong on the way, in words.

    Raises:
        TrainingError: not even one sample fits, or the policy is to stop.
    """
    first = learner.strategy.reduces_first
    if first:
        warm_up(learner)
    notes = [*_settle_micro_batch(learner), *_settle_evaluation(learner)]
    if not first:
        warm_up(learner)
    return notes


def warm_up(learner: Learner) -> None:
    """Let the strategy do what it has to before the first step, with two samples, which fit where a micro-batch does.

    Raises:
        OutOfMemory: they do not, and it had to be done first.
    """
    size = min(2, learner.plan.batches.micro_batch, learner.loaders.train.size)

    def loss() -> Tensor:
        with learner.kept.precision.autocast():
            return learner.task.loss_sum(learner.strategy.callable, first_batch(learner.loaders.train, size))

    with preserve_buffers(learner.kept.model):
        learner.strategy.warm_up(lambda: together(learner.world, loss))


def _settle_micro_batch(learner: Learner) -> list[str]:
    if learner.settled.words.batch.size == "auto" and not learner.settled.start.manifest:
        _take_the_largest(learner)
        return []
    if smaller := learner.settled.start.smaller:
        learner.settled = with_batch(learner.settled, smaller)
    _try_the_shortest(learner)
    notes = []
    while not _fits(learner, learner.plan.batches.micro_batch):
        notes.append(shrink(learner))
    return notes


def _settle_evaluation(learner: Learner) -> list[str]:
    """A task that evaluates in a way of its own has no batches to try."""
    loader = learner.loaders.val if learner.loaders.val is not None else learner.loaders.test
    notes: list[str] = []
    if loader is None or type(learner.task).evaluate is not Task.evaluate:
        return notes

    def evaluate_a_batch() -> None:
        model, batch = learner.kept.for_use(), first_batch(loader, min(learner.eval_batch, loader.size))
        with preserve_buffers(model), evaluating(model), learner.kept.precision.autocast():
            learner.task.measure(model, batch)

    while not _fits_everywhere(learner, evaluate_a_batch):
        notes.append(shrink_evaluation(learner))
    return notes


def _try_the_shortest(learner: Learner) -> None:
    """An epoch may end with a micro-batch of one sample, and BatchNorm over single features can't train on one."""
    batches = learner.plan.batches
    if learner.strategy.lanes == 1 and batches.shortest == 1 < batches.micro_batch:
        try:
            _fits(learner, 1)
        except ValueError as error:
            raise RequestError(
                f"an epoch ends with one sample; --model {learner.settled.model} can't train on it: {error}",
                remedy="--drop-last, or a --batch-size that leaves more than one over",
            ) from error


def shrink(learner: Learner) -> str:
    """Halve the micro-batch; the global batch, and so the gradient, stay as they are.

    Raises:
        TrainingError: it can't be halved, or must not be.
    """
    size = learner.plan.batches.micro_batch
    acting = {"whole groups of environments": learner.settled.source.pieces is not None}
    _check_may_halve(learner, size, f"with micro-batches of {size}", acting)
    learner.settled = with_batch(learner.settled, size // 2)
    kinds = {type(m).__name__ for m in learner.kept.model.modules() if isinstance(m, _BatchNorm | _DropoutNd)}
    text = f"out of memory: micro-batches of {size // 2} instead of {size}, the same global batch"
    return text + (f"; smaller micro-batches for {' and '.join(sorted(kinds))} too" if kinds else "")


def shrink_evaluation(learner: Learner) -> str:
    """Halve the batches of evaluations, whose figures are sums over samples and stay the same, to rounding.

    Raises:
        TrainingError: they can't be halved, or must not be.
    """
    size, own = learner.eval_batch, type(learner.task).evaluate is not Task.evaluate
    _check_may_halve(learner, size, f"in an evaluation with batches of {size}", {"the task's own evaluation": own})
    learner.loaders.eval_limit = size // 2
    return f"out of memory in an evaluation: batches of {size // 2} instead of {size}"


def _check_may_halve(learner: Learner, size: int, what: str, reasons: dict[str, bool]) -> None:
    """Raises TrainingError with the first reason that holds."""
    config = learner.config
    reasons = {
        "--on-oom stop": config.fault.on_oom == "stop",
        "one sample": size == 1,
        "--exact": config.reproducibility.exact,
    } | reasons
    if why := next((reason for reason, holds in reasons.items() if holds), None):
        raise TrainingError(f"out of memory {what} ({why})", remedy=_REMEDY)


def _take_the_largest(learner: Learner) -> None:
    """--batch-size auto: double until something does not fit, or a micro-batch is a worker's whole share."""
    batches = learner.plan.batches
    share = learner.config.batch.global_size or learner.loaders.train.size
    limit = max(1, -(-share // batches.workers))
    limit = min(limit, learner.settled.start.smaller or limit)
    if learner.world.device.type != "cuda":
        limit = min(limit, _MOST_WITHOUT_GPU)
    size, best = _least(learner), 0
    while size <= limit and _fits(learner, size):
        size, best = size * 2, size
    if not best:
        raise TrainingError("--batch-size auto: out of memory with a single sample", remedy=_REMEDY)
    because = f"measured: {size} does not fit" if size <= limit else "the largest that is of use here"
    learner.settled = with_measured_batch(learner.settled, best, learner.world, because)
    _try_the_shortest(learner)


def _least(learner: Learner) -> int:
    """Two samples where BatchNorm over single features can't train on one; another ValueError comes again with two."""
    try:
        _fits(learner, 1)
    except ValueError:
        return 2
    return 1


def _fits(learner: Learner, size: int) -> bool:
    """Whether every rank can run forward and backward with so many samples, beside the optimizer's state."""
    model = learner.kept.model
    with preserve_buffers(model):
        fits = _fits_everywhere(learner, lambda: _run(learner, size))
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] if fits else []
    model.zero_grad(set_to_none=True)
    if unused and learner.strategy.name == "ddp" and not learner.config.communication.find_unused_parameters:
        names = ", ".join(unused[:4]) + (" …" if len(unused) > 4 else "")
        raise RequestError(
            f"--model {learner.settled.model}: {names} took no part in the loss, and DDP waits for every gradient",
            remedy="--find-unused-parameters, or --freeze them",
        )
    return fits


def _fits_everywhere(learner: Learner, work: Callable[[], None]) -> bool:
    """Whether no rank runs out of memory in it, beside the state that the optimizer will have."""

    def work_beside_the_state() -> None:
        _reserved = [] if learner.kept.optimizer.state else _room_for_state(learner)
        work()

    try:
        together(learner.world, work_beside_the_state)
    except OutOfMemory:
        return False
    finally:
        free_memory(learner.world.device)
    return True


def _run(learner: Learner, size: int) -> None:
    """Twice on a GPU: in the second pass the first one's gradients take their room, as in accumulation."""
    batch = first_batch(learner.loaders.train, min(size * learner.strategy.lanes, learner.loaders.train.size))
    for _ in range(2 if learner.world.device.type == "cuda" else 1):
        forward_backward(learner, batch, 1.0, last=False)


def _room_for_state(learner: Learner) -> list[Tensor]:
    """What the optimizer will allocate at its first step: two tensors for each parameter (Adam)."""
    if learner.world.device.type != "cuda":
        return []
    return [torch.empty_like(p) for p in learner.trained for _ in range(2)]


def survive_out_of_memory(run: "Run", error: RuntimeError) -> None:
    """A step ran out of memory: forget it, and go on with micro-batches of half the size.

    With several processes the others are in the middle of a reduction by now, and from the optimizer on the weights may
    have moved already, in part. So the run has to start again: the next attempt finds the note that is left in the
    folder.

    Args:
        error: its traceback holds what the step had in memory, and gives it up here.

    Raises:
        TrainingError: one of these, or nothing left to halve.
    """
    moved = run.observer.watch.phase == "optimizer"
    run.strategy.abandon()
    run.kept.optimizer.zero_grad(set_to_none=True)
    traceback.clear_frames(error.__traceback__)
    free_memory(run.world.device)
    text = shrink(run)
    if run.world.size == 1 and not moved:
        run.note_fault("out of memory", text)
        return
    with needed(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)  # on a node that has no part of it yet
        batches = run.plan.batches
        leave_note(run.folder, {"batch_size": batches.micro_batch, "global_batch_size": batches.global_batch})
    who = f"rank {run.world.rank} ran out of memory" if run.world.size > 1 else "out of memory"
    raise TrainingError(
        f"{who}{' in the optimizer' if moved else ''} at step {run.progress.step}",
        remedy=f"run the same command again: it goes on from the last checkpoint with {text.split(': ')[1]}",
    )
