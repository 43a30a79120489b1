"""Losses of the user's own on what a network returns: tensors, tuples, dicts, and transformers' output objects."""

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import adapt_model, is_of_transformers
from multigpu_cli.tasks.own_loss import Criterion

TARGETS = torch.tensor([0, 2, 1, 2])
LOGITS = torch.nn.functional.one_hot(torch.tensor([0, 2, 1, 0]), 3).float()
BATCH = Batch(LOGITS, TARGETS, torch.arange(4), 0)
SOURCE = DataSource(train=[], val=None, test=None, input_shape=(3,), num_classes=3)  # type: ignore[arg-type]


class Output(OrderedDict[str, Any]):
    """As transformers': a dict whose entries are attributes."""

    @property
    def logits(self) -> Tensor:
        found: Tensor = self["logits"]
        return found


class LikeTransformers(nn.Module):
    """Names its input, has a configuration, and takes anything more in silence."""

    main_input_name = "input_ids"
    config = SimpleNamespace()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Output:
        return Output(logits=input_ids)


def measure_batch(criterion: Callable[[Any, Any], Tensor], model: nn.Module) -> tuple[float, list[int]]:
    """The mean loss, and how many are right."""
    task = Criterion(SOURCE, TaskConfig(), criterion, has_logits=is_of_transformers(model))
    adapted = adapt_model(model, whole_output=True)
    measure = task.measure(adapted, BATCH)
    assert float(task.loss_sum(adapted, BATCH)) == pytest.approx(float(measure.loss_sum))
    return float(measure.loss_sum) / 4, measure.counts.tolist()


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        cross_entropy,
        lambda logits, targets: cross_entropy(logits, targets),
        lambda out, targets: cross_entropy(out.logits, targets),
        lambda out, targets: cross_entropy(out["logits"], targets),
    ],
    ids=["torch's", "function", "of logits", "of the object", "of the dict"],
)
def test_a_criterion_takes_the_logits_of_transformers_or_the_whole_output(criterion: Any) -> None:
    loss, counts = measure_batch(criterion, LikeTransformers())
    assert loss == pytest.approx(float(cross_entropy(LOGITS, TARGETS)))
    assert counts == [3, 0, 4], "right, not a number, rows"


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, inputs: Tensor) -> Any:
        return self.make(inputs)


@pytest.mark.parametrize(
    ("make", "pick"),
    [
        (lambda x: (x, x), lambda out: out[0]),
        (lambda x: {"logits": x}, lambda out: out["logits"]),
        (lambda x: SimpleNamespace(logits=x), lambda out: out.logits),
    ],
    ids=["tuple", "dict", "object"],
)
def test_other_outputs_come_as_they_are_and_have_no_accuracy(make: Any, pick: Any) -> None:
    loss, counts = measure_batch(lambda out, targets: cross_entropy(pick(out), targets), Returns(make))
    assert loss == pytest.approx(float(cross_entropy(LOGITS, TARGETS)))
    assert counts == []


def test_an_entry_that_transformers_would_pass_over_is_refused() -> None:
    model = adapt_model(LikeTransformers())
    assert model({"input_ids": LOGITS, "labels": TARGETS}) is LOGITS
    with pytest.raises(RequestError, match="takes no boxes, which a sample has"):
        model({"input_ids": LOGITS, "boxes": LOGITS})
