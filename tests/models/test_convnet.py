import pytest
import torch

from multigpu_cli.errors import RequestError
from multigpu_cli.models.networks.convnet import ConvNet


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 4, 4), (4, 5, 9), (1, 40, 6)])
def test_images_of_any_size_become_logits(shape):
    model = ConvNet(shape, 7, width=8)
    for samples in (1, 3):
        logits = model(torch.randn(samples, *shape))
        assert logits.shape == (samples, 7)
        logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("shape", [(128,), (9, 128), (3, 32, 3), (1, 2, 2, 2)])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(RequestError, match=r"--model convnet needs images .*--data gives") as refused:
        ConvNet(shape, 10)
    assert "mlp" in refused.value.remedy


def test_a_samples_logits_do_not_depend_on_its_batch():
    model = ConvNet((1, 8, 8), 10).eval()
    images = torch.randn(6, 1, 8, 8)
    torch.testing.assert_close(model(images)[2:3], model(images[2:3]))


def test_it_learns():
    torch.manual_seed(0)
    images, labels = torch.randn(32, 1, 8, 8), torch.arange(32) % 4
    model = ConvNet((1, 8, 8), 4, width=8, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
