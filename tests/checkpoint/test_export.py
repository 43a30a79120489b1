import io
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from multigpu_cli.capabilities import MODELS
from multigpu_cli.commands import export
from multigpu_cli.commands.export import export_network, export_weights
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.models.build import adapt_model
from multigpu_cli.runtime import factories

STATE = {"w": torch.arange(6.0).view(2, 3), "count": torch.tensor(7), "half": torch.ones(3, dtype=torch.bfloat16)}

# -- weights


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights_are_all_there_and_load_elsewhere(name: str, tmp_path: Path) -> None:
    tied = STATE | {"again": STATE["w"], "turned": STATE["w"].t()}
    export_weights(tied, tmp_path / name)
    if name.endswith(".pt"):
        found = torch.load(tmp_path / name, weights_only=True)
    else:
        found = load_file(tmp_path / name)
    assert found.keys() == tied.keys()
    assert all(torch.equal(found[key], tied[key]) and found[key].dtype == tied[key].dtype for key in tied)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights_in_half_precision(name: str, tmp_path: Path) -> None:
    export_weights(STATE, tmp_path / name, "fp16")
    load = partial(torch.load, weights_only=True) if name.endswith(".pt") else load_file
    found = load(tmp_path / name)
    assert {key: value.dtype for key, value in found.items()} == {
        "w": torch.float16,
        "count": torch.int64,
        "half": torch.float16,
    }
    assert torch.equal(found["w"], STATE["w"].half())
    with pytest.raises(RequestError, match=r"--dtype fp16: w has values beyond its range\n  try: --dtype bf16"):
        export_weights({"w": torch.tensor([1.0, 7e4])}, tmp_path / f"again{name}", "fp16")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_weights_that_come_back_changed_are_not_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "serialize", lambda state: _bytes(state | {"w": state["w"] + 1}))
    with pytest.raises(TrainingError, match="the file differs from what was written"):
        export_weights(STATE, tmp_path / "w.pt")
    assert list(tmp_path.iterdir()) == []


def _bytes(state: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


# -- networks


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)).eval()


def test_a_network_of_torch_export_takes_any_number_of_samples(tmp_path: Path) -> None:
    model = network()
    assert export_network(model, torch.randn(5, 4), tmp_path / "net.pt2") < 1e-6
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for count in (1, 2, 33):
        inputs = torch.randn(count, 4)
        torch.testing.assert_close(loaded(inputs), model(inputs))
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]


def test_a_network_of_onnx_takes_any_number_of_samples(tmp_path: Path) -> None:
    import onnxruntime

    model = network()
    assert export_network(model, torch.randn(5, 4), tmp_path / "net.onnx") < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 2, 33):
        inputs = torch.randn(count, 4)
        (found,) = session.run(["output"], {"input": inputs.numpy()})
        np.testing.assert_allclose(found, model(inputs).detach().numpy(), atol=1e-5)
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_a_network_that_computes_something_else_is_not_left_there(
    wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    monkeypatch.setattr(export, "_run_pt2", lambda _: lambda inputs: model(inputs) + wrong)
    with pytest.raises(TrainingError, match="outputs differ from the original's by"):
        export_network(model, torch.randn(5, 4), tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_difference_counts_beside_the_greatest_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    nn.init.constant_(model.get_parameter("0.bias"), 1e4)
    monkeypatch.setattr(export, "_run_pt2", lambda _: lambda inputs: model(inputs) + 0.5)
    assert export_network(model, torch.randn(5, 4), tmp_path / "net.pt2") == pytest.approx(0.5, abs=1e-2)


def test_a_network_that_cannot_be_exported_says_what_can(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs if float(inputs.sum()) > 0 else -inputs

    with pytest.raises(RequestError, match=r"this model can't be exported \(\w+: \w.*\n.*\.safetensors"):
        export_network(Branching(), torch.randn(5, 4), tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mlp", "convnet", pytest.param("resnet18", marks=pytest.mark.slow), "har-convnet"])
def test_the_networks_for_samples_with_classes_can_be_exported(name: str, tmp_path: Path) -> None:
    shape = {"har-convnet": (3, 32), "mlp": (12,)}.get(name, (3, 16, 16))
    factory = factories.find_factory(name, MODELS, flag="--model")
    model = factories.call_factory(
        factory, {"input_shape": shape, "num_classes": 4, "mode": "flatten"}, {}, where="model"
    )
    assert export_network(model.eval(), torch.randn(4, *shape), tmp_path / "net.pt2") < 1e-5


class Several(nn.Module):
    """Two inputs, two outputs; `Whole` takes them as one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 2)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        said = self.net(torch.cat([left, right], 1))
        return {"said": said, "half": said / 2}


class Whole(Several):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(batch["left"], batch["right"])


LEFT, RIGHT = torch.randn(5, 3), torch.randn(5, 2)


CALLS: dict[str, tuple[nn.Module, Any]] = {
    "by position": (Several(), (LEFT, RIGHT)),
    "by name": (Several(), {"right": RIGHT, "left": LEFT}),
    "whole": (Whole(), {"left": LEFT, "right": RIGHT}),
}


@pytest.mark.parametrize(
    ("how", "suffix"),
    [
        *((how, ".pt2") for how in CALLS),
        ("by name", ".onnx"),
        *(pytest.param(how, ".onnx", marks=pytest.mark.slow) for how in ("by position", "whole")),
    ],
)
def test_a_network_of_several_inputs_is_exported(how: str, suffix: str, tmp_path: Path) -> None:
    model, inputs = CALLS[how]
    adapt_model(model)
    assert export_network(model.eval(), inputs, tmp_path / f"net{suffix}") < 1e-5
    if suffix == ".onnx" and type(model) is Several:
        session = pytest.importorskip("onnxruntime").InferenceSession(str(tmp_path / "net.onnx"))
        assert {each.name for each in session.get_inputs()} == {"left", "right"}
