"""Losses over the global batch: those of plain PyTorch on the whole batch, however it is divided."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.data import DataLoader

from multigpu_cli.commands.predict.predict import predict_run
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.distributed.world import World
from multigpu_cli.monitor import journal
from tests.support.die_at_third_checkpoint import die_at_third_checkpoint
from tests.support.global_losses import OwnLoss, Towers, contrast, pairs
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import run_training
from train_multi_gpu import evaluate_with_multi_gpu, train_with_multi_gpu

pytestmark = pytest.mark.usefixtures("in_tmp_path")
HERE = "tests.support.global_losses:"
CASES: dict[str, dict[str, Any]] = {
    "triplets": {"task": HERE + "Triplets", "model": HERE + "encoder"},
    "contrast": {"task": HERE + "Contrast", "model": HERE + "Towers"},
    "own loss": {"task": "from-model", "model": HERE + "OwnLoss"},
    "supcon": {"task": HERE + "SupCon", "model": HERE + "encoder", "sets": ["model.args={norm: true, dropout: 0.3}"]},
    "drawn": {"task": HERE + "DrawnNegatives", "model": HERE + "encoder"},
}
SETTINGS: dict[str, Any] = {
    "data": HERE + "pairs",
    "global_batch_size": 32,  # 90 samples: the last one has 26
    "batch_size": 8,
    "epochs": 2,
    "log_interval": 1,
    "lr": 0.05,
    "optimizer": "sgd",
}


def train(case: str, workers: int = 1, **flags: Any) -> dict[str, Any]:
    ended = run_training(workers, **SETTINGS | CASES[case] | flags)
    assert ended.error == ""
    return ended.summary


def read_losses(folder: str) -> list[float]:
    events = [event for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] in ("train", "eval")]
    return [event["loss"] for event in events]


def read_weights(folder: str) -> Tensor:
    weights = torch.load(f"{folder}/last.pt", weights_only=True)["model"]
    return torch.cat([value.flatten() for value in weights.values() if value.is_floating_point()])


def take_step(size: int, workers: int, folder: Path) -> list[float]:
    """How far the gradient of a step of 32 samples is from that of plain PyTorch, relatively, on each rank."""

    def run(world: World | None) -> float:
        torch.manual_seed(0)
        model, data = OwnLoss(), pairs("train", 0, 32)
        before = [p.detach().clone() for p in model.parameters()]
        loss = contrast(Towers.forward(model, data.tensors[0]))
        expected = torch.autograd.grad(loss, list(model.parameters()))
        result = train_with_multi_gpu(
            model,
            DataLoader(data, batch_size=size),
            torch.optim.SGD(model.parameters(), lr=1.0),
            None,
            num_epochs=1,
            global_batch_size=32,
            save_dir=str(folder / f"{size}-{workers}"),
            screen="silent",
            settings={"task": "from-model"},
        )
        assert result["summary"]["final"]["train_loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
        moved = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
        apart = torch.cat([(a - b).flatten() for a, b in zip(moved, expected, strict=True)]).norm()
        return float(apart / torch.cat([each.flatten() for each in expected]).norm())

    return [run(None)] if workers == 1 else run_on_each_rank(workers, run)


@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 5, 32])
def test_step_is_that_of_plain_torch_at_any_micro_batch(tmp_path: Path, size: int, workers: int) -> None:
    assert max(take_step(size, workers, tmp_path)) < 1e-6


def test_exact_gives_same_bits_on_workers_with_idle_ones() -> None:
    """A micro-batch of 16 is half of a step, and the third worker has none."""
    summaries = [train("own loss", workers, batch_size=16, exact=True, save_dir=f"run{workers}") for workers in (1, 3)]
    assert summaries[0]["fingerprint"] == summaries[1]["fingerprint"]
    assert summaries[0]["final"] == summaries[1]["final"]
    assert read_losses("run1") == read_losses("run3")


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ddp_takes_same_steps_with_idle_workers(workers: int) -> None:
    """A step is one micro-batch."""
    for count in (1, workers):
        train("own loss", count, batch_size=32, save_dir=f"run{count}")
    torch.testing.assert_close(read_weights("run1"), read_weights(f"run{workers}"), rtol=1e-5, atol=1e-6)
    assert read_losses("run1") == pytest.approx(read_losses(f"run{workers}"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_exact_gives_same_bits_through_kill_and_resize(case: str) -> None:
    """On 1, 2 and 3 workers, at three micro-batch sizes; for each size a run is killed and resized."""
    for index, size in enumerate([4, 8, 16]):
        flags: dict[str, Any] = {"batch_size": size, "exact": True}
        results = [train(case, workers, **flags, save_dir=f"{size}-{workers}") for workers in (1, 2, 3)]
        killed = SETTINGS | CASES[case] | flags | {"save_dir": f"{size}-killed", "checkpoint_every": "1"}
        assert run_training(index + 1, prepare=die_at_third_checkpoint, **killed).killed
        ended = run_training((index + 1) % 3 + 1, **killed)
        assert ended.summary["resumed_from"]
        assert len({str((each["fingerprint"], each["final"])) for each in (*results, ended.summary)}) == 1
    if case != "supcon":  # BatchNorm and dropout depend on the micro-batch
        for size in (4, 8):
            torch.testing.assert_close(read_weights(f"{size}-1"), read_weights("16-1"), rtol=1e-5, atol=1e-6)
            assert read_losses(f"{size}-1") == pytest.approx(read_losses("16-1"), rel=1e-5)


def test_micro_batch_size_changes_rounding_only() -> None:
    for size in (4, 32):
        train("triplets", batch_size=size, save_dir=f"of{size}")
    torch.testing.assert_close(read_weights("of4"), read_weights("of32"), rtol=1e-5, atol=1e-6)
    assert read_losses("of4") == pytest.approx(read_losses("of32"), rel=1e-5)


def test_batchnorm_moves_once_in_a_step() -> None:
    """By a tenth of the mean over its micro-batches, although each of them runs forward twice."""
    one_step: dict[str, Any] = {"global_batch_size": 90, "batch_size": 30, "epochs": 1, "lr": 1e-12}
    train("supcon", save_dir="run", sets=["model.args={norm: true}"], **one_step)
    weights = torch.load("run/last.pt", weights_only=True)["model"]
    assert int(weights["2.num_batches_tracked"]) == 1
    views, _ = pairs("train", 42)[:]
    means = linear(views.flatten(1), weights["1.weight"], weights["1.bias"]).mean(0)
    torch.testing.assert_close(weights["2.running_mean"], 0.1 * means, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"task": HERE + "ViewsInTurn"}, "rows of 2 samples for a global loss: float32 (4, 4)"),
        ({"task": HERE + "LossOfEach"}, "the global loss returned float32 (2,), not a number ()"),
        ({"task": HERE + "OwnTemperature"}, "a trainable tensor that is no parameter of the model"),
        ({"multi_gpu": "fsdp", "workers": 2}, "--multi-gpu fsdp can't be used with a loss over the global batch"),
        ({"compile": "reduce-overhead"}, "--compile reduce-overhead can't be used with a loss over the global batch"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_global_loss_that_does_not_fit_is_refused(flags: dict[str, Any], message: str) -> None:
    flags = SETTINGS | CASES["triplets"] | {"save_dir": "run"} | flags
    ended = run_training(flags.pop("workers", 1), **flags)
    assert ended.kind == "RequestError"
    assert message in ended.error
    assert "\n  try: " in ended.error
    assert not Path("run").exists()


def test_plan_names_rows_and_second_pass(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_training(dry_run=True, screen="normal", **SETTINGS | CASES["triplets"]).error == ""
    shown = " ".join(capfd.readouterr().out.split())
    assert "global loss" in shown
    assert "of 32 rows" in shown


def test_guard_is_silent_about_global_losses(capfd: pytest.CaptureFixture[str]) -> None:
    for case in CASES:
        train(case, save_dir=case.replace(" ", "-"), screen="normal", exact=True, max_steps=1, epochs=1)
    assert "warning" not in capfd.readouterr().out.lower()


def test_evaluation_takes_groups_in_order(tmp_path: Path) -> None:
    """25 samples in groups of 10, in batches of 4, on 3 workers of which the last batch's may have none."""
    torch.manual_seed(0)
    model, data = OwnLoss(), pairs("val", 0)
    with torch.no_grad():
        groups = [contrast(Towers.forward(model, part)) * len(part) for part in data.tensors[0].split(10)]
    expected = float(torch.stack(groups).sum()) / 25

    def run(size: int, world: World | None) -> float:
        settings: dict[str, Any] = {"global_batch_size": 10, "settings": {"task": "from-model"}}
        return float(evaluate_with_multi_gpu(model, DataLoader(data, batch_size=size), None, **settings)["test_loss"])

    assert run(4, None) == pytest.approx(expected, rel=1e-6)
    for size in (4, 25):
        found = run_on_each_rank(3, partial(run, size))
        assert found == [run(size, None)] * 3


def test_half_precision_keeps_rows_in_32_bits() -> None:
    plain, half = (train("contrast", amp=amp, save_dir=amp) for amp in ("off", "bf16"))
    assert half["final"]["train_loss"] == pytest.approx(plain["final"]["train_loss"], rel=0.05)


def test_run_out_of_memory_continues_with_half_the_micro_batch() -> None:
    """In the second pass of a micro-batch, whose gradient is discarded."""
    flags: dict[str, Any] = {
        "model": "tests.support.oom_model:net",
        "sets": ["model.args={after: 7, limit: 8, backward: true}"],
    }
    small = train("triplets", **flags, batch_size=8, save_dir="small")
    halved = train("triplets", **flags, batch_size=16, save_dir="halved")
    assert [fault["kind"] for fault in halved["faults"]] == ["out of memory"]
    assert halved["final"]["train_loss"] == pytest.approx(small["final"]["train_loss"], rel=1e-5)


def test_predict_writes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    train("triplets", save_dir="run")
    predict_run(InferenceRequest(run=Path("run"), own_code=True), Path("rows.npy"))
    assert numpy.load("rows.npy").shape == (25, 4)
