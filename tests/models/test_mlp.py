import torch
from torch import nn

from multigpu_cli.models.networks.mlp import build


def test_samples_of_any_shape_are_flattened():
    for shape in ((20,), (9, 128), (3, 8, 8)):
        assert build(shape, 5)(torch.randn(3, *shape)).shape == (3, 5)


def test_width_depth_and_dropout_are_the_users():
    layers = list(build((4,), 3, width=7, depth=3, dropout=0.4).children())
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [(4, 7), (7, 7), (7, 7), (7, 3)]
    assert [layer.p for layer in layers if isinstance(layer, nn.Dropout)] == [0.4] * 3


def test_depth_0_is_a_linear_model():
    assert sum(parameter.numel() for parameter in build((6,), 2, depth=0).parameters()) == 14
