import math
from typing import Any

import pytest
import torch

from multigpu_cli.errors import RequestError
from multigpu_cli.models.networks.convnet import HarConvNet as build


@pytest.mark.parametrize("shape", [(9, 128), (1, 128), (3, 17)])
def test_signals_become_logits(shape):
    model = build(shape, 6)
    for samples in (1, 4):
        logits = model(torch.randn(samples, *shape))
        assert logits.shape == (samples, 6)
        logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_silent_channel_gives_finite_logits_and_gradients():
    model = build((2, 32), 3)
    signals = torch.zeros(4, 2, 32, requires_grad=True)
    model(signals).sum().backward()
    assert signals.grad is not None
    assert signals.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("shape", [(128,), (9, 15), (1, 28, 28)])
def test_what_is_no_signal_is_refused(shape):
    with pytest.raises(RequestError, match=r"--model har-convnet needs signals .*--data gives"):
        build(shape, 6)


def test_how_strong_a_signal_is_reaches_the_decision_although_features_are_normalised():
    torch.manual_seed(0)
    model: Any = build((1, 64), 2).eval()
    signals = torch.randn(5, 1, 64)
    signals -= signals.mean(-1, keepdim=True)
    torch.testing.assert_close(model.features(2 * signals), model.features(signals), atol=1e-3, rtol=1e-3)
    difference = model(2 * signals) - model(signals)
    expected = model.classify[1].weight[:, -1] * math.log(2)
    torch.testing.assert_close(difference, expected.expand(5, 2), atol=2e-2, rtol=0)
