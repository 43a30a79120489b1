"""What the guard's findings mean for a run: refused or warned of, by the size of a step and --exact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate

from multigpu_cli.data.loader import Batch
from multigpu_cli.errors import RequestError
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.guard.findings import Finding, Refusal, decide
from multigpu_cli.run.guard.first_batch import check_user_code
from multigpu_cli.tasks.base import BatchMetrics, Task
from tests.run import test_profile_micro_batch as profile
from tests.run.guard import planted_models as planted

ALWAYS, SEVERAL, EXACT, NEVER = (Finding(each.name, "b", "c", each) for each in Refusal)
PROJECTION = Finding("projection", "b", "c", Refusal.NEVER, only_several=True)


@pytest.mark.parametrize(
    ("several", "exact", "refused"),
    [
        (False, False, [ALWAYS]),
        (True, False, [ALWAYS, SEVERAL]),
        (False, True, [ALWAYS, SEVERAL, EXACT]),
        (True, True, [ALWAYS, SEVERAL, EXACT]),
    ],
)
def test_decide_refuses_by_size_of_step_and_exactness(several: bool, exact: bool, refused: list[Finding]) -> None:
    findings = [ALWAYS, SEVERAL, EXACT, NEVER, PROJECTION]
    warned = [each for each in findings if each not in refused and (several or each is not PROJECTION)]
    assert decide(findings, several=several, exact=exact) == (refused, warned)


class Fitted:
    """Of one of the planted networks, a factory for inputs of six numbers and three classes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), getattr(planted, self._name)(), nn.Linear(4, 3))


class Replacing(nn.Module):
    """Replaces a trained parameter in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.layer.weight = nn.Parameter(self.layer.weight.detach())
        logits: Tensor = self.layer(inputs)
        return logits


def linear() -> nn.Module:
    return nn.Linear(6, 3)


class Gaps(Dataset[tuple[Tensor, int] | None]):
    """Samples of which some can't be read, and a collate function that drops these."""

    num_classes = 3

    def __init__(self, split: str) -> None:
        self.inputs = torch.randn(24, 6)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        return None if index % 3 == 1 else (self.inputs[index], index % 3)

    def collate_fn(self, samples: list[Any]) -> Any:
        return default_collate([sample for sample in samples if sample is not None])


class CountingSamples(Task):
    """A task that sums over rows, and leaves the number of samples as the number of units."""

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return cross_entropy(model(batch.inputs), batch.targets, reduction="sum")

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        return BatchMetrics(self.loss_sum(model, batch).double(), torch.zeros(0, dtype=torch.int64))


teacher, failing, right = Fitted("Teacher"), Fitted("Failing"), Fitted("Caching")
counting, gathering, by_rank = Fitted("CountingForNobody"), Fitted("Gathering"), Fitted("ScalingByRank")


def build(folder: Path, model: str, **flags: str | bool) -> TrainComponents:
    return profile.components(folder, f"{__name__}:{model}", **{"batch_size": "4", "global_batch_size": "8", **flags})


def test_check_refuses_a_fault_if_steps_have_several_micro_batches(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="forward writes the parameters") as error:
        check_user_code(build(tmp_path, "teacher"))
    assert "--set guard=off" in str(error.value.remedy)
    assert not (tmp_path / "run").exists()


def test_check_warns_of_a_fault_if_steps_are_one_micro_batch(tmp_path: Path) -> None:
    [warning] = check_user_code(build(tmp_path, "teacher", global_batch_size="4"))
    assert "forward writes the parameters 1.teacher.weight" in warning


def test_check_refuses_state_without_effect_only_if_exact(tmp_path: Path) -> None:
    [warning] = check_user_code(build(tmp_path, "counting"))
    assert "so far the loss is the same" in warning
    with pytest.raises(RequestError, match="passes"):
        check_user_code(build(tmp_path, "counting", exact=True))


def test_check_is_quiet_about_right_code(tmp_path: Path) -> None:
    made = build(tmp_path, "right")
    weights = {name: value.clone() for name, value in made.state.model.state_dict().items()}
    assert check_user_code(made) == []
    assert "guard" not in made.plan.notes
    assert all(torch.equal(value, weights[name]) for name, value in made.state.model.state_dict().items())


def test_check_refuses_replaced_parameters_of_the_optimizer(tmp_path: Path) -> None:
    made = build(tmp_path, "Replacing", global_batch_size="4")
    made.state.model(torch.randn(4, 6))  # as the trial of a micro-batch
    with pytest.raises(RequestError, match=r"forward replaces the parameters layer\.weight"):
        check_user_code(made)


def test_check_refuses_dropped_samples_of_a_task_that_counts_them(tmp_path: Path) -> None:
    own = {"data": f"{__name__}:Gaps", "task": f"{__name__}:CountingSamples"}
    with pytest.raises(RequestError, match="collate_fn returned 2 targets for 4 samples"):
        check_user_code(build(tmp_path, "linear", **own))


def test_check_warns_of_a_pass_that_fails(tmp_path: Path) -> None:
    made = build(tmp_path, "right")
    made.state.model[1].change = planted.Failing.change.__get__(failing()[1])  # type: ignore[index]
    [warning] = check_user_code(made)
    assert "a forward pass of half of 4 samples raised KeyError (planted_models.py:" in warning
    assert "the guard examined no further" in warning


@pytest.mark.parametrize(("sharded", "guard"), [(True, "on"), (False, "off")])
def test_plan_says_that_the_guard_examines_nothing(tmp_path: Path, sharded: bool, guard: str) -> None:
    made = build(tmp_path, "teacher", guard=guard)
    made.strategy.sharded = sharded
    assert check_user_code(made) == []
    [row] = [text for label, text in made.plan.rows() if label == "guard"]
    assert ("divides" in row) == sharded
    assert ("off" in row) == (guard == "off")
