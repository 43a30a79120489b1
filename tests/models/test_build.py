import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.config.schema import ModelConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import build_model, checkpoint_activations, find_frozen
from multigpu_cli.optimizers.eval_weights import EMAModel

OFFERED = {"input_shape": (1, 8, 8), "num_classes": 10, "mode": "flatten", "seed": 42}
MODULE = """
from torch import nn
def net(num_classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes))
class Net(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(64, num_classes)
def text():
    return "net"
def bare():
    return nn.ReLU()
def build_scripted():
    import torch, warnings
    with warnings.catch_warnings(action="ignore"):  # deprecated, but people have them
        return nn.Sequential(torch.jit.trace(nn.Linear(64, 10), torch.zeros(1, 64)))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_models_for_tests.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_models_for_tests", None)


def build(name: str, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(**config), name, OFFERED)


@pytest.mark.parametrize("name", ["mlp", "convnet", "resnet18"])
def test_a_network_of_ours_learns_its_shape_from_the_data(name: str) -> None:
    assert build(name)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_the_users_own(own: None) -> None:
    assert build("my_models_for_tests:net", args={"width": 6})[1].out_features == 6  # type: ignore[index]
    assert build("my_models_for_tests:Net").out_features == 10


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("convent", {}, "unknown name 'convent'"),
        ("mlp", {"args": {"widht": 3}}, r"model\.args\.widht"),
        ("my_models_for_tests:text", {}, "returned a str, not an nn.Module"),
        ("my_models_for_tests:build_scripted", {}, "the factory returned a TorchScript module"),
        ("my_models_for_tests:bare", {}, "no parameter is left to train"),
        ("mlp", {"freeze": ("*",)}, "no parameter is left to train"),
        ("mlp", {"freeze": ("features.*",)}, r"--freeze 'features\.\*' matches no parameter"),
    ],
)
def test_what_cannot_be_trained_is_refused(own: None, name: str, config: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        build(name, **config)


def test_freezing_keeps_the_parameters_whose_names_match() -> None:
    model = build("convnet", freeze=("features.*", "*.bias"))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name != "classify.1.weight"}


def test_frozen_parameters_get_no_gradient() -> None:
    model = build("mlp", freeze=("1.*",))
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    state = dict(model.named_parameters())
    assert state["1.weight"].grad is None
    assert state["7.weight"].grad is not None


def test_an_unmatched_pattern_shows_names() -> None:
    with pytest.raises(RequestError) as refused:
        find_frozen(build("mlp"), ["nope"])
    assert "1.weight" in refused.value.remedy


def test_sync_batchnorm_replaces_batchnorm() -> None:
    plain, synced = build("resnet18"), build("resnet18", sync_bn=True)
    assert any(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in synced.modules())
    assert fingerprint(plain.state_dict()) == fingerprint(synced.state_dict())


class Blocks(nn.Module):
    """Blocks in a ModuleList, as transformers have them, each with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
            for _ in range(3)
        )
        self.head = nn.Linear(4, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        for block in self.blocks:
            features = features + block(features)
        logits: Tensor = self.head(features.mean((-2, -1)))
        return logits


def train_once(model: nn.Module) -> dict[str, Tensor]:
    """Gradients, buffers and the loss of a pass with dropout."""
    inputs = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(9)
    loss = model(inputs).square().sum()
    loss.backward()
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients | {name: buffer.clone() for name, buffer in model.named_buffers()}


def fresh(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Blocks() if name == "blocks" else build_model(ModelConfig(), name, OFFERED)


@pytest.mark.parametrize("name", ["mlp", "convnet", "resnet18", "blocks"])
def test_recomputed_activations_give_the_same_bits(name: str) -> None:
    plain, thrifty = fresh(name), fresh(name)
    checkpoint_activations(thrifty)
    for _ in range(2):
        expected, found = train_once(plain), train_once(thrifty)
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", ["mlp", "convnet", "resnet18", "blocks"])
def test_activations_really_are_recomputed(name: str) -> None:
    """Each block's parts run forward twice, and less is kept for backward."""

    def kept(model: nn.Module) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.untyped_storage().nbytes())
            return tensor

        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(6, 1, 8, 8)).sum()
        assert own
        loss.backward()
        return sum(sizes)

    thrifty = fresh(name)
    checkpoint_activations(thrifty)
    assert kept(thrifty) < 0.8 * kept(fresh(name))


def test_names_and_evaluation_stay_as_they_are() -> None:
    plain, thrifty = fresh("blocks").eval(), fresh("blocks").eval()
    checkpoint_activations(thrifty)
    inputs = torch.randn(2, 1, 8, 8)
    with torch.inference_mode():
        assert torch.equal(plain(inputs), thrifty(inputs))
    assert list(plain.state_dict()) == list(thrifty.state_dict())


def test_frozen_blocks_are_not_recomputed() -> None:
    model = fresh("blocks")
    for parameter in find_frozen(model, ["blocks.0.*"]):
        parameter.requires_grad_(False)
    checkpoint_activations(model)
    assert "forward" not in vars(model.blocks[0])  # type: ignore[index]
    assert "forward" in vars(model.blocks[1])  # type: ignore[index]


def test_a_copy_recomputes_with_its_own_weights() -> None:
    """The moving average is a deep copy: it must not go on calling the blocks of the original."""
    model = fresh("blocks")
    checkpoint_activations(model)
    shadow = EMAModel(model, 0.9)
    shadow.update_parameters(model)
    inputs = torch.randn(2, 1, 8, 8)
    shadow.eval()
    before = shadow(inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(shadow(inputs), before)
    assert float(copy.deepcopy(shadow)(inputs).abs().sum()) > 0
