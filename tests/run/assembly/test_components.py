"""What the table of learning rates says of groups, and the sizes of evaluations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from multigpu_cli.run.assembly.components import GroupLabel, describe_groups
from multigpu_cli.tasks.supervised import Classification
from tests.run.test_build_components import components

MODEL = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
MODEL.append(nn.Linear(2, 2))
MODEL[3].weight = MODEL[0].weight
P = dict(MODEL.named_parameters())


def describe(
    *groups: dict[str, Any], decays: bool = False, frozen: dict[str, list[Any]] | None = None
) -> list[tuple[str, str]]:
    made: Any = SimpleNamespace(
        state=SimpleNamespace(model=MODEL, optimizer=SimpleNamespace(param_groups=groups)),
        plan=SimpleNamespace(schedule=SimpleNamespace(peak=0.1)),
        config=SimpleNamespace(optimizer=SimpleNamespace(groups=decays)),
        strategy=SimpleNamespace(find_parameter=lambda parameter: parameter),
        frozen=frozen or {},
    )
    return describe_groups(made)


def group(*names: str, **more: Any) -> dict[str, Any]:
    return {"params": [P[name] for name in names], "weight_decay": 0.5} | more


ALL = "7 tensors, 20 parameters: 0.weight, 0.bias, 1.weight, …"
SIX = "6 tensors, 16 parameters: 0.bias, 1.weight, 1.bias, …"


def test_where_all_learns_alike_there_is_no_table() -> None:
    names = list(P)
    assert describe(group(*names[:3]), group(*names[3:], rate_factor=1.0)) == []
    assert describe(group(*names), frozen={"frozen until epoch 3": [P["1.bias"]], "no": []}) == [
        ("0.1", ALL), ("frozen until epoch 3", "1 tensor, 2 parameters: 1.bias")
    ]  # fmt: skip
    assert describe(group(*names[1:])) == [("0.1", SIX), ("frozen", "1 tensor, 4 parameters: 0.weight")]
    assert describe(group(*names, rate_factor=2.0)) == [("0.2 (× 2)", ALL)]


def test_the_highest_rate_comes_first_then_muon_then_the_highest_decay() -> None:
    found = describe(
        group("0.weight", weight_decay=0.01, hidden=True),
        group("1.weight", hidden=False),
        group("2.weight", weight_decay=0.0, hidden=False),
        group("0.bias", "1.bias", "2.bias", rate_factor=0.25, hidden=False),
        group("3.bias", rate_factor=2.0, hidden=False),
        decays=True,
    )
    assert found == [
        ("0.2 (× 2), decay 0.5, AdamW", "1 tensor, 2 parameters: 3.bias"),
        ("0.1, decay 0.01, Muon", "1 tensor, 4 parameters: 0.weight"),
        ("0.1, decay 0.5, AdamW", "1 tensor, 4 parameters: 1.weight"),
        ("0.1, decay 0, AdamW", "1 tensor, 4 parameters: 2.weight"),
        ("0.025 (× 0.25), decay 0.5, AdamW", "3 tensors, 6 parameters: 0.bias, 1.bias, 2.bias"),
    ]
    assert GroupLabel(2.0, None, None).format(0.5) == "1 (× 2)"


class Own(Classification):
    def evaluate(self, *_: Any) -> Any:
        pytest.fail("it is only asked whether a task evaluates in its own way")


@pytest.mark.parametrize("limit", [None, 4, 40])
def test_an_evaluation_has_twice_the_samples_of_a_micro_batch_if_they_fit(limit: int | None, tmp_path: Path) -> None:
    made = components(tmp_path, model="mlp", data="tests.support.user_code:tensors", batch_size="5")
    made.loaders.max_eval_batch_size = limit
    assert made.eval_batch_size == (4 if limit == 4 else 10)
    assert (made.evaluates_in_batches, made.optimizer_draws) == (True, False)
    made.task = object.__new__(Own)
    assert made.evaluates_in_batches is False
