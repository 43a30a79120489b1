"""Models of other libraries, and data in other forms than pairs, through the Python API."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from multigpu_cli.errors import RequestError
from train_multi_gpu import MultiGPUConfig, MultiGPUTrainingManager, evaluate_with_multi_gpu, train_with_multi_gpu

QUIET: dict[str, Any] = {"screen": "silent"}


class Rows(Dataset[dict[str, Tensor]]):
    """Counting upwards, as Hugging Face's datasets hand out rows."""

    def __init__(self, labels: str) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index + torch.arange(6)) % 5
        row = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        some = torch.where(torch.arange(6) < 2 + index % 5, tokens, -100)
        labels = {"tokens": tokens, "some": some, "class": torch.tensor(index % 5)}
        return row | ({"labels": labels[self.labels]} if self.labels else {})


def transformer(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 5,
        "n_positions": 6,
        "n_layer": 1,
        "n_embd": 16,
        "n_head": 2,
        "num_labels": 5,
    }
    shape |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = transformers.GPT2Config(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=4)
    model: nn.Module = getattr(transformers, f"GPT2{kind}")(config)
    return model


@pytest.mark.parametrize("labels", ["", "tokens"])
def test_a_language_model_of_transformers_needs_no_loss(tmp_path: Path, labels: str) -> None:
    model, loader = transformer("LMHeadModel"), DataLoader(Rows(labels), batch_size=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = train_with_multi_gpu(model, loader, optimizer, num_epochs=8, save_dir=str(tmp_path), **QUIET)
    assert "tokens_per_second" in (tmp_path / "journal.jsonl").read_text()
    found = evaluate_with_multi_gpu(model, loader, **QUIET)
    assert found["accuracy"] > 90
    assert found["test_loss"] < results["final_loss"]


def test_the_loss_that_a_model_of_transformers_computes_is_that_of_the_task(tmp_path: Path) -> None:
    """Both are the mean over tokens of the step, also where rows have unlike numbers of them, in any micro-batches."""
    ends = []
    for task, size in (("language-model", 6), ("from-model", 6), ("from-model", 3)):
        settings = {"task": task}
        run: dict[str, Any] = {"global_batch_size": 12, "save_dir": str(tmp_path / f"{task}{size}"), **QUIET}
        loader = DataLoader(Rows("some"), batch_size=size)
        found = train_with_multi_gpu(transformer("LMHeadModel"), loader, num_epochs=2, settings=settings, **run)
        ends.append(found["final_loss"])
    assert ends[1:] == pytest.approx(ends[:1] * 2, rel=1e-5)


def test_numbers_without_a_loss_are_a_regression(tmp_path: Path) -> None:
    """Outputs (n, 1) for targets (n,): torch's own loss would compare each with each, and end at the mean of all."""
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    model, loader = nn.Linear(3, 1), DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    train_with_multi_gpu(model, loader, optimizer, num_epochs=10, save_dir=str(tmp_path), **QUIET)
    assert model.weight.flatten().tolist() == pytest.approx([1, 1, 1], abs=0.05)
    assert evaluate_with_multi_gpu(model, loader, **QUIET)["test_loss"] < 1e-3


def test_a_classifier_of_transformers_comes_back_as_it_is(tmp_path: Path) -> None:
    model = transformer("ForSequenceClassification")
    with MultiGPUTrainingManager(MultiGPUConfig(num_epochs=1, save_dir=str(tmp_path), **QUIET)) as manager:
        given, loader, _ = manager.setup_training(model, Rows("class"))
        assert given is model
        assert manager.train_epoch(loader)["loss"] < 3
    found = evaluate_with_multi_gpu(model, DataLoader(Rows("class"), batch_size=6), nn.CrossEntropyLoss(), **QUIET)
    assert found["samples"] == 30


class Pairs(Dataset[Any]):
    """The sum of two inputs, nested or flat."""

    def __init__(self, *, flat: bool = False) -> None:
        self.rows, self.flat = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), flat

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        left, right = self.rows[index].split(2)
        target = self.rows[index].sum()
        return (left, right, target) if self.flat else ((left, right), target)


class Both(nn.Linear):
    """Two inputs; with a target it returns its loss."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, left: Tensor, right: Tensor, target: Tensor | None = None) -> Any:  # type: ignore[override]
        said = super().forward(torch.cat([left, right], 1)).squeeze(1)
        return said if target is None else {"loss": (said - target).square().mean()}


@pytest.mark.parametrize(
    ("flat", "settings"),
    [(False, {}), (True, {"data.inputs": 2}), (True, {"data.inputs": 2, "task": "from-model"})],
    ids=["nested", "flat", "from-model"],
)
def test_two_inputs_are_two_arguments(tmp_path: Path, flat: bool, settings: dict[str, Any]) -> None:
    model, loader = Both(), DataLoader(Pairs(flat=flat), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    more: dict[str, Any] = QUIET | {"settings": settings}
    results = train_with_multi_gpu(model, loader, optimizer, num_epochs=10, save_dir=str(tmp_path), **more)
    assert results["final_loss"] < 1e-2
    assert evaluate_with_multi_gpu(model, loader, **more)["test_loss"] < 1e-3
    assert not model._forward_pre_hooks, "the model is left as it came"
    assert model(*next(iter(DataLoader(Pairs())))[0]).shape == (1,)


def test_samples_without_targets_need_a_criterion_or_a_model_that_has_one() -> None:
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    with pytest.raises(RequestError, match=r"must be \(input, target\), not tuple of 1"):
        train_with_multi_gpu(Both(), loader, **QUIET)
