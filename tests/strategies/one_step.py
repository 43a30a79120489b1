"""One step of the contract between loop and strategy, as the engine's `train_step` does it, on a small model."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.strategies.base import Strategy


def network(*, norm: bool = True, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Alike wherever it is built; with BatchNorm or without."""
    torch.manual_seed(7)
    between = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(5, 8), *between, nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def samples(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(3, (count,), generator=generator)


def reduce_step(strategy: Strategy, plan: BatchPlan, rank: int, step: int = 0) -> None:
    """Leaves the step's gradient in `.grad` and its statistics in the buffers."""
    inputs, targets = samples(plan.samples, next(strategy_model(strategy).parameters()).dtype)
    passes = plan.local_forward_passes(step, rank, strategy.replicas_per_process)
    strategy.begin_step(-(-len(plan.all_micro_batches(step)) // strategy.replicas_per_process))
    for position, (number, start, stop) in enumerate(passes):
        with strategy.accumulate(last=position == len(passes) - 1):
            loss = cross_entropy(strategy.callable(inputs[start:stop]), targets[start:stop], reduction="sum")
            (loss * (strategy.loss_factor / plan.num_samples(step))).backward()
        strategy.after_backward(number)
    strategy.reduce_gradients(idle=not passes)


def strategy_model(strategy: Strategy) -> nn.Module:
    assert isinstance(strategy.callable, nn.Module)
    return strategy.callable


def state(model: nn.Module) -> dict[str, list[float]]:
    """Gradients and buffers by name, as plain numbers."""
    found = {f"{name}.grad": p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
    return {name: [] if value is None else value.double().flatten().tolist() for name, value in found.items()}
