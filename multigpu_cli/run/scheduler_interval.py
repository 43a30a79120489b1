"""When a scheduler of the user's own steps: after each optimizer step or each epoch, by what it was made for."""

from collections.abc import Callable, Iterable
from copy import deepcopy

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.planning.batch import BatchPlan

_ENDS_ANYWHERE = (lr_scheduler.CosineAnnealingLR, lr_scheduler.PolynomialLR, lr_scheduler.SequentialLR)
_UNDERFLOW = 1e-12  # an exponential reaches zero too, long after it has become as good as zero


def choose_interval(scheduler: LRScheduler, epochs: int, steps: int, batches: BatchPlan) -> str:
    """'step' or 'epoch'.

    Args:
        steps: length of the run in optimizer steps; max_steps may end it before its epochs do.

    Raises:
        RequestError: it was made for another number of steps.
    """
    whole = epochs * batches.steps_per_epoch
    length = _find_length(scheduler, (epochs, steps, whole))
    if length == epochs or (length not in (None, steps, whole) and isinstance(scheduler, _ENDS_ANYWHERE)):
        return "epoch"
    if length is None:
        return "step" if _counts_steps(scheduler) else "epoch"
    if length in (steps, whole):
        return "step"
    raise RequestError(
        f"scheduler: {type(scheduler).__name__} is made for {pluralize(length, 'step')}, and the run has "
        f"{pluralize(steps, 'optimizer step')} of up to {pluralize(batches.global_batch, 'sample')} in "
        f"{pluralize(epochs, 'epoch')}",
        remedy=f"make it for {steps} steps (global_batch_size keeps their number on any number of workers), or for "
        f"{epochs}, to step it once an epoch; or scheduler_step='step' or 'epoch', to step it as it is",
    )


def refuse_early_end(scheduler: LRScheduler, calls: int) -> None:
    """Refuse a scheduler, as made or as a checkpoint has it, that would raise an error during the run.

    Raises:
        RequestError: it ends before it is stepped so often.
    """
    if isinstance(scheduler, OneCycleLR) and calls > scheduler.total_steps:
        raise RequestError(
            f"scheduler: OneCycleLR has {scheduler.total_steps} steps, and the run steps it {calls} times",
            remedy=f"OneCycleLR(total_steps={calls + 1}); a resumed run has its checkpoint's, and its length",
        )


def _find_length(scheduler: LRScheduler, expected: Iterable[int]) -> int | None:
    """After how many of its steps a scheduler is at its end; None where none shows."""
    match scheduler:
        case OneCycleLR():
            return int(scheduler.total_steps)
        case lr_scheduler.CosineAnnealingLR():
            return int(scheduler.T_max)
        case lr_scheduler.PolynomialLR():
            return int(scheduler.total_iters)
        case lr_scheduler.SequentialLR():
            before = int(scheduler._milestones[-1])
            last = _find_length(scheduler._schedulers[-1], [number - before for number in expected])
            return None if last is None else before + last
        case LambdaLR():
            return next(filter(None, (_find_zero(factor, expected) for factor in scheduler.lr_lambdas)), None)
    return None


def _counts_steps(scheduler: LRScheduler) -> bool:
    """Whether it has no end and counts optimizer steps: CyclicLR, and warm-ups of transformers."""
    lambdas = scheduler.lr_lambdas if isinstance(scheduler, LambdaLR) else []
    return isinstance(scheduler, lr_scheduler.CyclicLR) or any(
        "num_warmup_steps" in getattr(each, "keywords", {}) for each in lambdas
    )


def _find_zero(factor: Callable[[int], float], expected: Iterable[int]) -> int | None:
    """The step at which a factor becomes zero: at one that is expected (a cosine rises again), or from there on."""
    if named := getattr(factor, "keywords", {}).get("num_training_steps"):  # of transformers' schedules
        return int(named)
    try:
        factor = deepcopy(factor)  # an object may count its calls
        if found := next((step for step in expected if step > 0 and factor(step) <= 0 < factor(step - 1)), None):
            return found
        high = next((2**power for power in range(1, 40) if factor(2**power) <= 0), 0)
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if factor(middle) <= 0 else (middle, high)
        return high if high and factor(low) > _UNDERFLOW else None
    except Exception:  # the user's own code may raise anything, such as at the end of a table: no end shows
        return None
