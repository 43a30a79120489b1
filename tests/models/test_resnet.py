from typing import Any

import pytest
import torch

from multigpu_cli.errors import RequestError
from multigpu_cli.models.networks.convnet import resnet18


def test_it_is_the_network_of_the_paper():
    model = resnet18((3, 224, 224), 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_689_512
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 17 + 3  # and three shortcuts


@pytest.mark.parametrize(("side", "met"), [(32, (32, 4)), (63, (63, 8)), (64, (16, 2)), (8, (8, 2)), (4, (4, 2))])
def test_the_stem_and_the_strides_suit_the_images(side, met):
    model: Any = resnet18((3, side, side), 10, width=4).eval()
    images = torch.randn(2, 3, side, side)
    after_stem = model.stem(images)
    assert (after_stem.shape[-1], model.stages(after_stem).shape[-1]) == met
    assert model(images).shape == (2, 10)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 4, 20), (3, 64, 64)])
def test_one_sample_is_enough_to_train_on(shape):
    resnet18(shape, 5, width=4).train()(torch.randn(1, *shape)).sum().backward()


@pytest.mark.parametrize("shape", [(9, 128), (3, 3, 3)])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(RequestError, match=r"--model resnet18 needs images .*--data gives"):
        resnet18(shape, 10)
