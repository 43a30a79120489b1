"""PowerSGD on two ranks: plain at first, then close to the plain gradient in the mean, and never poisoned by a NaN."""

import torch
import torch._dynamo  # seconds; DDP imports it, and here it is done once rather than in each forked rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multigpu_cli.config.schema import CommunicationConfig
from multigpu_cli.distributed.world import World
from multigpu_cli.strategies.ddp import DDP, PowerSGD
from tests.support.ranks import run_on_each_rank


def gradients(steps: int, plain_steps: int, *, nan_at: int | None = None) -> list[list[float]]:
    """Distance of each step's gradient from the mean of both ranks', and of the sums so far, relative to the latter."""

    def work(world: World) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(96, 64, bias=False)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        hook = PowerSGD(ddp, plain_steps=plain_steps)
        inputs = torch.randn(2, 96)
        expected = inputs.mean(0).expand(64, 96)
        sums, found = torch.zeros(64, 96), []
        for step in range(steps):
            bad = step == nan_at
            ddp(inputs[world.rank] * (torch.nan if bad else 1.0)).sum().backward()
            hook.rollback(torch.tensor(float(bad)))
            gradient = model.weight.grad
            assert gradient is not None
            sums += torch.zeros_like(gradient) if bad else gradient
            found.append(float((sums / max(1, step + (nan_at is None)) - expected).norm() / expected.norm()))
            model.zero_grad(set_to_none=True)
        return found

    return run_on_each_rank(2, work)


def test_the_first_steps_are_plain_and_the_mean_is_kept_afterwards() -> None:
    first, second = gradients(8, 3)
    assert first == second, "all ranks end with the same gradient"
    assert max(first[:3]) < 1e-6
    assert max(first) < 0.05


def test_a_skipped_step_leaves_nothing_behind() -> None:
    first, _ = gradients(9, 2, nan_at=5)
    assert first[-1] < 0.05


def test_a_skipped_step_leaves_neither_its_error_nor_its_statistics() -> None:
    def work(world: World) -> list[float]:
        model = nn.BatchNorm1d(2)
        strategy = DDP(model, world, CommunicationConfig(grad_compression="powersgd"))
        assert strategy._low_rank
        hook = strategy._low_rank._state
        assert (hook.matrix_approximation_rank, hook.start_powerSGD_iter) == (4, 100), "as docs/migration.md says"
        hook.error_dict[0] = torch.full((2,), torch.nan)
        strategy.begin_step(1)
        model.get_buffer("running_mean").fill_(torch.nan)
        strategy.rollback_buffers(torch.tensor(1.0))
        return [*hook.error_dict[0].tolist(), *model.get_buffer("running_mean").tolist()]

    assert run_on_each_rank(1, work) == [[0.0] * 4]


def test_several_buckets_do_not_wait_for_each_other() -> None:
    """gloo has two threads; the hook, left to itself, lets each bucket hold one while it waits for the other."""

    def work(world: World) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(8)))
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.03)
        hook = PowerSGD(ddp, plain_steps=3)
        for _ in range(8):
            ddp(torch.randn(4, 96)).sum().backward()
            model.zero_grad(set_to_none=False)
        assert len(hook._state.error_dict) > 1, "one of each bucket: they were sent in low rank"
        return float(next(model.parameters()).detach().sum())

    first, second = run_on_each_rank(2, work)
    assert first == second
