import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import DataConfig, TaskConfig
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.tasks.supervised import MultiLabel
from tests.support.world import CPU

NAMES = ("red", "round", "rare", "never")


def draw_logits(count: int = 50) -> tuple[Tensor, Tensor]:
    """Logits and 0/1 labels; the last label is never there and never said."""
    generator = torch.Generator().manual_seed(2)
    targets = (torch.rand(count, 4, generator=generator) < torch.tensor([0.5, 0.3, 0.1, 0.0])).long()
    logits = torch.randn(count, 4, generator=generator) + 2 * targets - 1
    logits[:, 3] = -5
    return logits, targets


def task(**config: float) -> tuple[MultiLabel, TensorDataset]:
    split = TensorDataset(*draw_logits())
    source = DataSource(train=split, val=split, test=None, input_shape=(4,), num_classes=0, class_names=NAMES)
    return MultiLabel(source, TaskConfig(**config)), split  # type: ignore[arg-type]


def test_every_figure_agrees_with_scikit_learn() -> None:
    components, split = task()
    loader = Loader(split, components.source, DataConfig(), device=CPU, seed=1)
    found = components.evaluate(nn.Identity(), loader, World(CPU), Precision("off", CPU), 16)
    logits, targets = draw_logits()
    said = (logits > 0).long()
    assert found.metrics == pytest.approx(
        {
            "loss": binary_cross_entropy_with_logits(logits.double(), targets.double()).item(),
            "accuracy": accuracy_score(targets, said),
            "f1": f1_score(targets, said, average="micro"),
        },
        rel=1e-12,
    )
    columns = precision_recall_fscore_support(targets, said, zero_division=0)
    for at, row in enumerate(found.details["per_class"]):
        assert row["class"] == NAMES[at]
        expected = [column[at] for column in columns]
        assert [row[key] for key in ("precision", "recall", "f1", "support")] == pytest.approx(expected, rel=1e-12)


def test_the_training_loss_is_summed_and_smoothed() -> None:
    logits, targets = draw_logits()
    whole = Batch(logits, targets, torch.arange(50), 0)
    plain, smooth = (task(label_smoothing=value)[0].loss_sum(nn.Identity(), whole) for value in (0.0, 0.2))
    assert plain.item() / 50 == pytest.approx(
        binary_cross_entropy_with_logits(logits, targets.float()).item(), rel=1e-6
    )
    softened = 0.1 + 0.8 * targets
    assert smooth.item() / 50 == pytest.approx(binary_cross_entropy_with_logits(logits, softened).item(), rel=1e-6)


def test_higher_f1_is_better_and_then_lower_loss() -> None:
    components, _ = task()
    scores = [components.score({"f1": f1, "loss": loss}) for f1, loss in [(0.5, 0.2), (0.6, 0.9), (0.6, 0.1)]]
    assert scores == sorted(scores)


def test_outputs_of_another_shape_are_named() -> None:
    logits, targets = draw_logits()
    with pytest.raises(ValueError, match=r"outputs \(50, 3\) for targets \(50, 4\)"):
        task()[0].loss_sum(nn.Identity(), Batch(logits[:, :3], targets, torch.arange(50), 0))
