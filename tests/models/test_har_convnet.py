import pytest
import torch

from multigpu_cli.errors import RequestError
from multigpu_cli.models.har_convnet import build


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
    assert signals.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("shape", [(128,), (9, 15), (1, 28, 28)])
def test_what_is_no_signal_is_refused(shape):
    with pytest.raises(RequestError, match=r"--model har-convnet needs signals .*--data gives"):
        build(shape, 6)


def test_strength_tells_classes_apart_that_have_the_same_shape():
    torch.manual_seed(0)
    labels = torch.arange(64) % 2
    wave = torch.sin(torch.arange(64) / 3 + 6 * torch.rand(64, 1))[:, None]
    signals = wave * (1 + labels)[:, None, None]
    model = build((1, 64), 2, width=8, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(signals), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(model(signals).argmax(1), labels)
