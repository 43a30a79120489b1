"""Networks that compute their own loss: where it is found, and what it is the mean over."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from multigpu_cli.config.schema import DataConfig, TaskConfig
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.infer_shape import infer_source
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.models.build import adapt_model
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.from_model import FromModel
from multigpu_cli.tasks.open_data import choose_form
from tests.support.run_training import run_training

CPU = torch.device("cpu")
FORM = choose_form(None, "from-model")
TWO, NONE = torch.tensor(2.0), torch.tensor(float("nan"))


class Rows(Dataset[Any]):
    """Eleven rows of six tokens, of which the labels of 0 to 5 count."""

    def __init__(self, part: str = "dict") -> None:
        self.tokens = torch.randint(7, (11, 6), generator=torch.Generator().manual_seed(0))
        self.labels = torch.where(torch.arange(6) < torch.arange(11)[:, None] % 6, self.tokens, -100)
        self.part = part

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        pair = self.tokens[index], self.labels[index]
        return {"input_ids": pair[0], "labels": pair[1]} if self.part == "dict" else pair


class CausalLMOutput(NamedTuple):
    loss: Tensor
    logits: Tensor


class Words(nn.Module):
    """Its loss is torch's mean over the labels that count; a causal one predicts the following label."""

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.causal = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double(), causal

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.net(input_ids)
        if not self.causal:
            return SimpleNamespace(loss=cross_entropy(logits.flatten(0, 1), labels.flatten()))
        return CausalLMOutput(cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


def source_of(dataset: Dataset[Any]) -> DataSource:
    return infer_source(dataset, None, None, FORM)


def loss_and_gradient(part: str, *, causal: bool, size: int) -> tuple[float, Tensor]:
    """Of all rows as one step, in micro-batches of so many, and what it evaluates to."""
    source, model = source_of(Rows(part)), Words(causal=causal)
    adapt_model(model)
    task = FromModel(source, TaskConfig())
    loader = Loader(source.train, source, DataConfig(num_workers=0), device=CPU, seed=0)
    units = 0
    for batch in loader.eval_batches(size, 0, 1):
        task.loss_sum(model, batch).backward()
        units += int(task.units(batch))
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) / units
    evaluated = task.evaluate(model, loader, World(CPU), Precision("off", CPU), size)
    return evaluated.metrics["loss"], gradient


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("part", ["dict", "pair"])
def test_a_step_is_the_mean_over_labels_however_it_is_cut(part: str, causal: bool) -> None:
    """Also where a micro-batch has none of them, whose mean is NaN."""
    whole, gradient = loss_and_gradient(part, causal=causal, size=11)
    for size in (1, 3):
        loss, parts = loss_and_gradient(part, causal=causal, size=size)
        assert loss == pytest.approx(whole, rel=1e-6)
        torch.testing.assert_close(parts, gradient, rtol=1e-6, atol=1e-9)


def task_of(**args: Any) -> FromModel:
    return FromModel(source_of(Rows("pair")), TaskConfig(), **args)


def compute_loss(outputs: Any, **args: Any) -> float:
    """The loss that is found in what a network returns."""
    tokens = torch.zeros(3, dtype=torch.int64)
    batch = Batch(torch.zeros(3, 1), tokens, torch.arange(3), 0)
    return float(task_of(**args).loss_sum(lambda _: outputs, batch)) / 3


@pytest.mark.parametrize(
    ("outputs", "args"),
    [
        (TWO, {}),
        (SimpleNamespace(loss=TWO, logits=torch.zeros(3)), {}),
        ({"loss": TWO, "other": NONE}, {}),
        ({"boxes": TWO / 2, "classes": TWO / 2}, {}),
        ((torch.zeros(3, 4), TWO), {}),
        ({"boxes": NONE, "classes": TWO}, {"loss": "classes"}),
        ((NONE, TWO), {"loss": 1}),
        (SimpleNamespace(loss=NONE, mine=TWO), {"loss": "mine"}),
    ],
)
def test_the_loss_is_found(outputs: Any, args: dict[str, Any]) -> None:
    assert compute_loss(outputs, **args) == 2.0


@pytest.mark.parametrize(
    ("outputs", "args"),
    [
        (torch.zeros(3), {}),
        ((TWO, TWO), {}),
        ({"boxes": TWO, "logits": torch.zeros(3)}, {}),
        ({"boxes": TWO}, {"loss": "classes"}),
        ((TWO,), {"loss": 5}),
        ([{"boxes": torch.zeros(2)}], {}),
    ],
)
def test_what_is_no_loss_is_not_taken_for_one(outputs: Any, args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no loss"):
        compute_loss(outputs, **args)


class Detector(nn.Module):
    """No loss in evaluation mode; one that dropout and BatchNorm would change in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.seen = nn.BatchNorm1d(6), nn.Dropout(0.5), torch.zeros(())
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        said = self.drop(self.norm(x.float()))
        if not self.training:
            return [{"boxes": row} for row in said]
        self.count = self.count + 1
        return {"loss_boxes": (said - x).abs().mean()}


def test_a_network_without_a_loss_in_evaluation_mode_is_measured_all_the_same() -> None:
    source, model = source_of(Rows("pair")), Detector()
    adapt_model(model)
    loader = Loader(source.train, source, DataConfig(num_workers=0), device=CPU, seed=0)
    task = FromModel(source, TaskConfig())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = [task.evaluate(model, loader, World(CPU), Precision("off", CPU), size).metrics["loss"] for size in (4, 4)]
    assert found[0] == found[1]
    assert 0 < found[0] < 1e-3, "neither dropout nor the statistics of a batch are in it"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules()), "as they were"


def no_loss() -> nn.Module:
    class Silent(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x.float())

    return Silent(6, 2)


def test_a_model_without_a_loss_is_told_before_anything_is_written(tmp_path: Any) -> None:
    flags: dict[str, Any] = {
        "model": "tests.tasks.test_from_model:no_loss",
        "task": "from-model",
        "save_dir": str(tmp_path / "x"),
    }
    ended = run_training(1, **flags)
    assert ended.kind == "RequestError"
    for text in (
        "no loss in what it returns",
        "it returned         float32 (2, 2)",
        "task.loss=NAME",
        "model(x=…, y=…)",
    ):
        assert text in ended.error
    assert not (tmp_path / "x").exists()


def without_gradient() -> nn.Module:
    class Detached(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x.float()).detach().square().mean()

    return Detached(6, 2)


def test_a_loss_that_no_parameter_is_part_of_is_refused(tmp_path: Any) -> None:
    ended = run_training(
        1, model=f"{__name__}:without_gradient", task="from-model", save_dir=str(tmp_path / "x"), max_steps=1
    )
    assert ended.kind == "RequestError"
    assert "no parameter that learns is part of the loss" in ended.error
    assert not (tmp_path / "x").exists()
