"""Models of other libraries, and data in other forms than pairs, through the Python API."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

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
        return row | {"tokens": {"labels": tokens}, "class": {"labels": torch.tensor(index % 5)}, "": {}}[self.labels]


def transformer(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    shape = {"vocab_size": 5, "n_positions": 6, "n_layer": 1, "n_embd": 16, "n_head": 2, "num_labels": 5}
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
