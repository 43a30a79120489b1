"""The gradient noise scale on a problem whose answer is known: loss |w − x|²/2 has the gradient w − x."""

import math

import pytest
import torch
from torch import Tensor

from multigpu_cli.monitor.meters import NoiseMeter, Norms, ratio

DIM, SIGMA, LENGTH = 50, 2.0, 4.0
KNOWN = DIM * SIGMA**2 / LENGTH**2  # tr(Σ)/|G|² = 12.5 samples


def gradient_of(samples: Tensor, weight: Tensor) -> Tensor:
    weight = weight.clone().requires_grad_()
    (0.5 * (weight - samples).square().sum() / len(samples)).backward()
    assert weight.grad is not None
    return weight.grad


def test_the_known_answer_is_found() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.full((DIM,), LENGTH / math.sqrt(DIM))
    estimates = []
    for _ in range(200):
        samples = SIGMA * torch.randn(32, DIM, generator=generator)
        small = float(gradient_of(samples[:8], weight).square().sum())
        large = float(gradient_of(samples, weight).square().sum())
        estimates.append(Norms(small, large, 8, 32).signal_and_noise())
    found = ratio(estimates)
    assert found is not None
    assert abs(found.value - KNOWN) < 3 * found.spread
    assert found.spread < 0.15 * KNOWN


def test_the_spread_is_that_of_repeated_trials() -> None:
    generator = torch.Generator().manual_seed(2)

    def trial() -> tuple[float, float]:
        pairs = [
            (16 + float(torch.randn(1, generator=generator)), 200 + 20 * float(torch.randn(1, generator=generator)))
        ]
        for _ in range(99):
            noise = torch.randn(2, generator=generator).tolist()
            pairs.append((16 + noise[0], 200 + 20 * noise[1]))
        found = ratio(pairs)
        assert found is not None
        return found.value, found.spread

    trials = [trial() for _ in range(300)]
    values = torch.tensor([value for value, _ in trials])
    mean_spread = sum(spread for _, spread in trials) / len(trials)
    assert mean_spread == pytest.approx(float(values.std()), rel=0.15)


def test_where_the_signal_drowns_nothing_is_said() -> None:
    assert ratio([(1.0, 1.0)] * 4) is None
    assert ratio([(-1.0, 1.0)] * 9) is None
    assert ratio([(1.0, 4.0)] * 9) == (4.0, 0.0)
    assert ratio([(1.0, -4.0)] * 9) == pytest.approx((0.0, math.sqrt(2)))


def test_the_meter_undoes_what_the_loss_was_multiplied_by() -> None:
    meter = NoiseMeter(interval=5, factor=3.0)
    assert meter.is_due(10, passes=2, done=1)
    assert [meter.is_due(11, 2, 1), meter.is_due(10, 1, 1), meter.is_due(10, 2, 2)] == [False] * 3
    assert not NoiseMeter(0).is_due(0, 2, 1)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0]) * 3
    meter.record_gradient([weight.grad])
    assert meter.take_small_norm() == pytest.approx(5.0)
    assert meter.take_small_norm() is None


def test_a_meter_that_never_looked_learns_from_the_others() -> None:
    meter, norms = NoiseMeter(interval=5), Norms(25.0, 10.0, 2, 8)
    for _ in range(5):
        meter.add(norms)
    found = meter.value()
    assert found is not None
    assert found.value == pytest.approx((25 - 10) / (1 / 2 - 1 / 8) / ((80 - 50) / 6))
    meter.add(norms._replace(small=math.nan))
    assert meter.value() == found
