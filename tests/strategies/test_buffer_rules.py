"""Buffers whose mean is no answer: a model's `buffer_rules` merge what the micro-batches of a step leave in them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.errors import RequestError
from multigpu_cli.strategies.buffer_rules import find_rules
from multigpu_cli.strategies.buffers import StepBuffers
from tests.support.run_training import run_training


class Observed(nn.Module):
    """A network that keeps bounds, a total and the last mean of its features, and a running mean from infinity."""

    lo: Tensor
    hi: Tensor
    seen: Tensor
    rows: Tensor
    latest: Tensor
    average: Tensor
    buffer_rules: Mapping[str, str] = {"lo": "min", "hi": "max", "seen": "sum", "rows": "sum", "lat*": "last"}

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 4), nn.Linear(4, 3)
        self.register_buffer("lo", torch.full((4,), torch.inf))
        self.register_buffer("hi", torch.full((4,), -torch.inf))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("latest", torch.zeros(4))
        self.register_buffer("average", torch.full((4,), torch.inf))

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.first(inputs)
        if self.training:
            self.observe(features.detach())
        logits: Tensor = self.last(features)
        return logits

    @torch.no_grad()
    def observe(self, features: Tensor) -> None:
        self.lo.copy_(torch.minimum(self.lo, features.amin(0)))
        self.hi = torch.maximum(self.hi, features.amax(0))
        self.seen += len(features)
        self.rows += len(features)
        self.latest.copy_(features.mean(0))
        mean = features.mean(0)
        self.average.copy_(torch.where(self.average.isinf(), mean, 0.9 * self.average + 0.1 * mean))


def observed() -> nn.Module:
    return nn.Sequential(Observed())


def take_steps(model: Observed, steps: list[list[Tensor]]) -> None:
    buffers = StepBuffers(model, 1, lambda total: total)
    for micro_batches in steps:
        buffers.begin_step(len(micro_batches))
        for number, features in enumerate(micro_batches):
            model.observe(features)
            buffers.collect(number)
        buffers.apply_mean_change()


def test_step_merges_values_of_micro_batches_by_rule() -> None:
    model, samples = Observed(), torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    take_steps(model, [list(samples[:12].split(3)), list(samples[12:].split(5))])
    assert torch.equal(model.lo, samples.amin(0))
    assert torch.equal(model.hi, samples.amax(0))
    assert (float(model.seen), int(model.rows)) == (24.0, 24)
    assert torch.equal(model.latest, samples[22:].mean(0))


def test_buffer_moves_from_infinity_to_the_mean_of_values() -> None:
    model, samples = Observed(), torch.randn(12, 4)
    take_steps(model, [list(samples.split(3))])
    assert torch.allclose(model.average, samples.mean(0))
    take_steps(model, [list(samples.split(3))])
    assert torch.allclose(model.average, samples.mean(0))


def test_skipped_step_restores_merged_values() -> None:
    model = Observed()
    buffers = StepBuffers(model, 1, lambda total: total)
    buffers.begin_step(2)
    for number in range(2):
        model.observe(torch.full((2, 4), torch.nan))
        buffers.collect(number)
    buffers.apply_mean_change()
    buffers.rollback(torch.tensor(1.0))
    assert torch.equal(model.lo, torch.full((4,), torch.inf))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_observers_of_torch_have_rules() -> None:
    from torch.ao.quantization import MinMaxObserver, MovingAverageMinMaxObserver

    model = nn.ModuleDict({"bounds": MinMaxObserver(), "moving": MovingAverageMinMaxObserver()})
    assert find_rules(model) == {"bounds.min_val": "min", "bounds.max_val": "max"}


@pytest.mark.parametrize(
    ("rules", "words"),
    [({"lo": "least"}, "'least', which is no rule"), ({"low*": "min"}, "'low*': 'min', which matches no buffer")],
)
def test_find_rules_refuses_what_names_nothing(rules: dict[str, str], words: str) -> None:
    model = Observed()
    model.buffer_rules = rules
    with pytest.raises(RequestError) as error:
        find_rules(model)
    assert words in str(error.value)
    assert "one of" in str(error.value.remedy)


@pytest.mark.parametrize("size", [4, 8])
def test_exact_runs_merge_buffers_alike_on_any_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.chdir(tmp_path)
    flags: dict[str, Any] = {"data": "tests.support.user_code:tensors", "model": f"{__name__}:observed", "max_steps": 3}
    flags |= {"batch_size": size, "global_batch_size": 20, "exact": True}
    endings: dict[object, str] = {}
    for workers in (1, 2, 3):  # with micro-batches of 8, the third worker has one of 4; of 20, five have four
        ended = run_training(workers, **flags, save_dir=f"run{workers}")
        endings[workers] = ended.summary["fingerprint"]
    endings["fsdp"] = run_training(2, **flags, multi_gpu="fsdp", save_dir="fsdp").summary["fingerprint"]
    assert len(set(endings.values())) == 1


def test_workers_without_exact_merge_as_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags: dict[str, Any] = {"data": "tests.support.user_code:tensors", "model": f"{__name__}:observed", "max_steps": 3}
    states = []
    for workers, size in ((1, 4), (3, 4), (2, 12)):  # with micro-batches of 12, the second worker has 8 samples
        run_training(workers, **flags, batch_size=size, global_batch_size=20, save_dir=f"run{workers}{size}")
        states.append(torch.load(f"run{workers}{size}/last.pt", weights_only=True)["model"])
    for state in states[1:]:
        for name in ("lo", "hi", "seen", "rows"):
            assert torch.allclose(state[f"0.{name}"].double(), states[0][f"0.{name}"].double(), rtol=1e-5)
    assert torch.allclose(states[1]["0.latest"], states[0]["0.latest"], rtol=1e-5)
