"""Runs with other optimizers: the same bits on any number of workers, through kills; what is evaluated and saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.checkpoint.weights import load_trained_weights
from tests.support.run_training import Ended, run_training

OWN = "tests.support.optimizers:"
RUN: dict[str, Any] = {
    "lr": 0.01,
    "exact": True,
    "batch_size": 5,
    "global_batch_size": 20,
    "epochs": 4,
    "checkpoint_every": 2,
    "log_interval": 1,
}


def run(folder: str, workers: int = 1, **flags: Any) -> Ended:
    return run_training(workers, save_dir=folder, **RUN | flags)


def evaluations(folder: str) -> list[tuple[str, float]]:
    events = [json.loads(line) for line in Path(folder, "journal.jsonl").read_text().splitlines()]
    return [(event["split"], event["loss"]) for event in events if event["event"] == "eval"]


def assert_same_through_a_kill(**flags: Any) -> None:
    """Two workers, one of them killed, and then one worker: as one worker alone."""
    whole = run("whole", **flags)
    assert whole.error == ""
    assert run("cut", 2, environ={"OWN_DEED": "1:12:SIGKILL"}, **flags).killed
    resumed = run("cut", **flags)
    assert resumed.error == ""
    assert resumed.summary["fingerprint"] == whole.summary["fingerprint"]
    assert evaluations("cut")[-2:] == evaluations("whole")[-2:]


@pytest.mark.parametrize(
    "name",
    [
        f"{OWN}ScheduleFreeSGD",
        f"{OWN}Noisy",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (f"{OWN}Manifold", "muon", "adagrad", "rmsprop", "adam", "adafactor", "radam", "adadelta")
        ),
    ],
)
def test_the_same_bits_through_a_kill_on_another_number_of_workers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    monkeypatch.chdir(tmp_path)
    assert_same_through_a_kill(optimizer=name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("adagrad", marks=pytest.mark.slow),
        pytest.param("rmsprop", marks=pytest.mark.slow),
        f"{OWN}ScheduleFreeSGD",
    ],
)
def test_fsdp_has_the_bits_of_one_worker(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ends = [run(f"on{workers}", workers, optimizer=name, multi_gpu=way) for workers, way in ((1, "none"), (2, "fsdp"))]
    assert [end.error for end in ends] == ["", ""]
    assert ends[0].summary["fingerprint"] == ends[1].summary["fingerprint"]
    assert evaluations("on1") == evaluations("on2")


def test_a_schedule_free_run_is_judged_and_saved_by_its_weights_for_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when it is evaluated and saved changes none of its weights."""
    monkeypatch.chdir(tmp_path)
    flags: dict[str, Any] = {
        "optimizer": f"{OWN}ScheduleFreeSGD",
        "model": "mlp",
        "schedule": "constant",
        "warmup_epochs": 0,
        "lr": 0.1,
    }
    assert run("often", **flags).error == ""
    assert run("seldom", **flags | {"checkpoint_every": 100, "keep": 1}).error == ""
    last = [load_trained_weights(Path(folder, "last.pt")).state for folder in ("often", "seldom")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    newest = max(Path("often/checkpoints").glob("step_*"))
    of_checkpoint = load_trained_weights(newest)
    assert all(torch.equal(of_checkpoint.state[name], last[0][name]) for name in last[0]), "export takes these"
    inner = torch.load(newest / "state.pt", weights_only=True)
    assert not torch.equal(inner["model"]["1.weight"], last[0]["1.weight"]), "and a resumed run the others"
    z = inner["optimizer"]["state"][0]["z"]
    assert torch.allclose(inner["model"]["1.weight"], 0.1 * z + 0.9 * last[0]["1.weight"], atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_the_plan_names_the_matrices_that_muon_leaves_to_adamw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("run", model="mlp", optimizer="muon", dry_run=True)
    assert ended.error == ""
    assert ended.summary["optimizer"].startswith("muon, weight decay 0.0001, gradient clipped to norm 1; ")
    assert ended.summary["optimizer"].endswith(" by AdamW, with the matrices 7.weight")


def test_several_workers_need_a_step_that_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("run", 2, optimizer=f"{OWN}Clocked", exact=False)
    assert ended.kind == "RequestError"
    assert f"--optimizer {OWN}Clocked is not deterministic" in ended.error
    assert not Path("run").exists()


def test_what_is_no_choice_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": f"{OWN}Plain", "lr": None}, "no default learning rate is known for it"),
        ({"optimizer": f"{OWN}Clocked"}, "is not deterministic"),
        ({"optimizer": f"{OWN}ScheduleFreeSGD", "ema": 0.9}, "--ema can't be used with ScheduleFreeSGD"),
        ({"schedule": "tests.distributed.test_optimizers:below_zero"}, "its factor of step 0 of 12 is -1"),
        ({"schedule": "tests.distributed.test_optimizers:counting"}, "two different factors"),
    ]
    for flags, told in wrong:
        ended = run("run", **flags)
        assert ended.kind == "RequestError"
        assert told in ended.error
    assert not Path("run").exists()


def below_zero(step: int, total: int) -> float:
    return -1.0


def counting(step: int, total: int, seen: list[int] = []) -> float:  # noqa: B006 - that is its fault
    seen.append(step)
    return 1 / len(seen)
