from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import DataConfig, TaskConfig
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.language.task import LanguageModel
from multigpu_cli.runtime.precision import Precision
from tests.support.ranks import run_on_each_rank
from tests.support.user_code import sentences
from tests.support.world import CPU

VAL = sentences("val", 3)
same = nn.Identity()


def task(vocabulary: int = 5, **config: float) -> LanguageModel:
    source = DataSource(train=VAL, val=VAL, test=None, input_shape=(9,), num_classes=vocabulary)
    return LanguageModel(source, TaskConfig(**config))  # type: ignore[arg-type]


def batch(logits: Tensor, targets: Tensor) -> Batch:
    return Batch(logits, targets, torch.arange(len(targets)), 0)


def draw_logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(21, 9, 5, generator=generator), VAL.tensors[1]


def test_only_targets_that_count_are_summed_and_counted() -> None:
    logits, targets = draw_logits()
    there = targets != -100
    assert 0 < int(there.sum()) < there.numel()
    assert not there.any(1).all(), "a sample without a single target is among them"
    components = task()
    assert int(components.units(batch(logits, targets))) == int(there.sum())
    expected = cross_entropy(logits[there], targets[there], reduction="sum")
    assert torch.allclose(components.loss_sum(same, batch(logits, targets)), expected)
    measured = components.measure(same, batch(logits, targets))
    assert measured.loss_sum.dtype == torch.float64
    assert float(measured.loss_sum) == pytest.approx(float(expected), rel=1e-6)
    right = int((logits[there].argmax(1) == targets[there]).sum())
    assert components.metrics(measured.counts, int(there.sum())) == {"accuracy": right / int(there.sum())}


def test_labels_can_be_smoothed_and_half_precision_is_widened() -> None:
    logits, targets = draw_logits()
    plain, smoothed = (task(label_smoothing=value).loss_sum(same, batch(logits, targets)) for value in (0.0, 0.3))
    there = targets != -100
    uniform = -logits[there].log_softmax(1).mean(1).sum()
    assert float(smoothed) == pytest.approx(0.7 * float(plain) + 0.3 * float(uniform), rel=1e-5)
    assert task().loss_sum(same, batch(logits.bfloat16(), targets)).dtype == torch.float32


def evaluate(world: World) -> Any:
    torch.manual_seed(1)
    model, components = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5)), task()
    loader = Loader(VAL, components.source, DataConfig(), device=CPU, seed=1)
    found = components.evaluate(model, loader, world, Precision("off", CPU), 4)
    return [found.metrics, found.samples]


def test_an_evaluation_is_the_mean_over_tokens_on_any_number_of_workers() -> None:
    alone = evaluate(World(CPU))
    assert [evaluated_there == alone for evaluated_there in run_on_each_rank(3, evaluate)] == [True] * 3
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    inputs, targets = VAL.tensors
    whole = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())  # torch's own mean leaves -100 out
    assert alone[0]["loss"] == pytest.approx(whole.item(), rel=1e-6)
    assert alone[0]["perplexity"] == pytest.approx(whole.exp().item(), rel=1e-6)
    assert alone[1] == 21


def test_a_split_without_a_single_target_has_no_loss() -> None:
    nothing = TensorDataset(VAL.tensors[0], torch.full((21, 9), -100))
    components = task()
    loader = Loader(nothing, components.source, DataConfig(), device=CPU, seed=1)
    found = components.evaluate(nn.Embedding(5, 5), loader, World(CPU), Precision("off", CPU), 4)
    assert found.metrics["loss"] != found.metrics["loss"]
    assert found.metrics["perplexity"] != found.metrics["perplexity"]
    assert 0 < components.figures({"loss": 1e6})["perplexity"] < float("inf"), "diverged, and still a number"


def test_a_dataset_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="vocabulary of 0 tokens"):
        task(vocabulary=0)


def test_outputs_of_another_shape_are_named() -> None:
    logits, targets = draw_logits()
    with pytest.raises(ValueError, match=r"outputs \(21, 5\) for targets \(21, 9\)"):
        task().loss_sum(same, batch(logits[:, 0], targets))
