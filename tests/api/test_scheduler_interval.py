"""Which schedulers are stepped after each optimizer step, which after each epoch, and which fit neither."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from multigpu_cli.api.from_objects import choose_interval
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import BatchPlan, plan_batches

EPOCHS, STEPS = 20, 240
BATCHES = plan_batches(
    samples=96, micro_batch=8, workers=1, accumulation=1, global_batch=None, drop_last=False, interleaved=False
)
Make = Callable[[torch.optim.Optimizer], LRScheduler]


def warm_up(step: int, *, num_warmup_steps: int, num_training_steps: int | None = None) -> float:
    """As transformers' schedules have them, by the names of the arguments."""
    return min(1.0, step / num_warmup_steps)


class Counting:
    """A factor that changes with each call, as an object may."""

    calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1.0


def factor(function: Callable[[int], float]) -> Make:
    return lambda optimizer: LambdaLR(optimizer, function)


def of_transformers(**more: int) -> Make:
    return factor(partial(warm_up, num_warmup_steps=10, **more))


def made(name: str, *args: Any, **more: Any) -> Make:
    return lambda optimizer: getattr(lr_scheduler, name)(optimizer, *args, **more)


def in_sequence(second: int, kind: str = "CosineAnnealingLR", name: str = "T_max") -> Make:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        last = getattr(lr_scheduler, kind)(optimizer, **{name: second})
        parts = [lr_scheduler.LinearLR(optimizer, total_iters=10), last]
        return lr_scheduler.SequentialLR(optimizer, parts, [10])

    return make


def chained(last: Make) -> Make:
    return lambda optimizer: lr_scheduler.ChainedScheduler(
        [made("LinearLR", total_iters=10)(optimizer), last(optimizer)]
    )


def choose(make: Make, steps: int = STEPS, batches: BatchPlan = BATCHES) -> str:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    return choose_interval(make(optimizer), EPOCHS, steps, batches)


CASES = {
    "its steps": (made("OneCycleLR", 0.1, total_steps=STEPS), "step"),
    "its epochs": (made("OneCycleLR", 0.1, total_steps=EPOCHS), "epoch"),
    "epochs times steps": (made("OneCycleLR", 0.1, epochs=EPOCHS, steps_per_epoch=12), "step"),
    "of transformers": (of_transformers(num_training_steps=STEPS), "step"),
    "of transformers by epoch": (of_transformers(num_training_steps=EPOCHS), "epoch"),
    "of transformers without end": (of_transformers(), "step"),
    "linear": (factor(lambda step: max(0.0, 1 - step / STEPS)), "step"),
    "linear by epoch": (factor(lambda epoch: max(0.0, 1 - epoch / EPOCHS)), "epoch"),
    "cosine": (factor(lambda step: 0.5 * (1 + math.cos(math.pi * step / STEPS))), "step"),
    "cosine by epoch": (factor(lambda epoch: 0.5 * (1 + math.cos(math.pi * epoch / EPOCHS))), "epoch"),
    "exponential": (factor(lambda epoch: 0.95**epoch), "epoch"),
    "constant": (factor(lambda epoch: 1.0), "epoch"),
    "table": (factor([1.0, 0.5, 0.25].__getitem__), "epoch"),
    "cosine of torch": (made("CosineAnnealingLR", STEPS), "step"),
    "cosine of torch by epoch": (made("CosineAnnealingLR", EPOCHS), "epoch"),
    "cosine of torch that goes on": (made("CosineAnnealingLR", 50), "epoch"),
    "polynomial": (made("PolynomialLR", STEPS), "step"),
    "in sequence": (in_sequence(STEPS - 10), "step"),
    "in sequence by epoch": (in_sequence(EPOCHS - 10), "epoch"),
    "linear of torch": (made("LinearLR", 1.0, 0.01, STEPS), "step"),
    "linear of torch by epoch": (made("LinearLR", 1.0, 0.01, EPOCHS), "epoch"),
    "warm-up of torch": (made("LinearLR", total_iters=3), "epoch"),
    "linear in sequence": (in_sequence(STEPS - 10, "LinearLR", "total_iters"), "step"),
    "one period": (made("CosineAnnealingWarmRestarts", STEPS), "step"),
    "periods by epoch": (made("CosineAnnealingWarmRestarts", 5), "epoch"),
    "chained": (chained(made("CosineAnnealingLR", STEPS)), "step"),
    "chained by epoch": (chained(made("CosineAnnealingLR", EPOCHS)), "epoch"),
    "cyclic": (made("CyclicLR", 0.01, 0.1), "step"),
    "stairs": (made("StepLR", 1), "epoch"),
}


@pytest.mark.parametrize(("make", "interval"), CASES.values(), ids=list(CASES))
def test_a_scheduler_is_stepped_as_it_was_made_for(make: Make, interval: str) -> None:
    assert choose(make) == interval


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (made("OneCycleLR", 0.1, total_steps=100), 100),
        (of_transformers(num_training_steps=1000), 1000),
        (factor(lambda step: max(0.0, 1 - step / 999)), 999),
        (factor(lambda step: step / 2 if step < 2 else max(0.0, 1 - (step - 2) / 98)), 100),
    ],
)
def test_one_made_for_neither_is_refused_with_both_numbers(make: Make, length: int) -> None:
    with pytest.raises(RequestError, match=f"made for {length:,} steps, and the run has 240 .* 8 samples in 20 epochs"):
        choose(make)


@pytest.mark.parametrize(("workers", "accumulation", "length"), [(2, 1, STEPS), (2, 2, STEPS), (2, 2, STEPS // 2)])
@pytest.mark.parametrize(
    "make",
    [
        lambda length: made("CosineAnnealingLR", length),
        lambda length: made("PolynomialLR", length),
        lambda length: made("LinearLR", 1.0, 0.01, length),
        lambda length: made("OneCycleLR", 0.1, total_steps=length),
        lambda length: in_sequence(length - 10),
        lambda length: chained(made("CosineAnnealingLR", length)),
        lambda length: factor(lambda step: (1 - step / length) ** 0.9),
    ],
    ids=["cosine", "polynomial", "linear", "one cycle", "in sequence", "chained", "power"],
)
def test_one_made_for_the_steps_of_a_single_process_is_refused(
    make: Callable[[int], Make], workers: int, accumulation: int, length: int
) -> None:
    batches = plan_batches(samples=96, micro_batch=8, workers=workers, accumulation=accumulation)
    steps = EPOCHS * batches.steps_per_epoch
    with pytest.raises(RequestError, match=f"made for {length} steps, and the run has {steps} "):
        choose(make(length), steps, batches)


def test_a_run_that_max_steps_ends_is_a_part_of_the_whole() -> None:
    assert choose(made("OneCycleLR", 0.1, total_steps=STEPS), 100) == "step"
    assert choose(made("OneCycleLR", 0.1, total_steps=100), 100) == "step"


def test_a_factor_that_counts_its_calls_is_not_moved() -> None:
    counting = Counting()
    choose(factor(counting))
    assert counting.calls == 1, "torch's own"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_the_warm_ups_of_transformers(name: str) -> None:
    optimization = pytest.importorskip("transformers.optimization")

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        scheduler: LRScheduler = optimization.get_scheduler(name, optimizer, 10, STEPS)
        return scheduler

    assert choose(make) == "step"


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "LinearLR"])
def test_length_of_epochs_and_max_steps_means_epochs(name: str) -> None:
    end = {"T_max": EPOCHS} if name == "CosineAnnealingLR" else {"total_iters": EPOCHS}
    assert choose(made(name, **end), EPOCHS) == "epoch"
