"""Networks with awkward habits meet the same on 1, 2 and 3 workers before the first step, and in it."""

from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.monitor import journal
from tests.support.run_training import Ended, run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {"global_batch_size": 12, "batch_size": 4, "max_steps": 2, "log_interval": 1, "lr": 0.01}
HABITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "caches made at the first pass": ({"model": "tests.support.awkward_models:caching"}, []),
    "weights in bf16": ({"model": "tests.support.awkward_models:half", "amp": "bf16"}, []),
    "draws from Python and NumPy": ({"model": "tests.support.awkward_models:drawing"}, []),
    "one sample fits": ({"model": "tests.support.awkward_models:greedy"}, ["model.args.training=1"]),
    "state beside tensors": ({"model": "tests.support.awkward_models:telling"}, []),
    "three samples fit, evaluated": ({"model": "tests.support.awkward_models:greedy"}, ["model.args.evaluation=3"]),
}
REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "stop": (
        {"on_oom": "stop", "model": "tests.support.awkward_models:greedy"},
        ["model.args.training=1"],
        "(--on-oom stop)",
    ),
    "state that needs code": (
        {"model": "tests.support.awkward_models:telling"},
        ["model.args.plain=false"],
        "get_extra_state of layers returns what could not be read back from a checkpoint without running code",
    ),
    "no autocast": (
        {"model": "tests.support.awkward_models:half"},
        [],
        "--model tests.support.awkward_models:half does not take the first batch",
    ),
}


def run_all(flags: dict[str, Any], sets: list[str]) -> list[Ended]:
    return [run_training(workers, **RUN | flags, save_dir=f"run{workers}", sets=sets) for workers in (1, 2, 3)]


def read_findings(workers: int) -> tuple[dict[str, Any], list[str], list[float], list[float]]:
    """What the plan said, what went wrong, and the losses of steps and evaluations."""
    lines = list(journal.read_events(f"run{workers}/journal.jsonl"))
    [start] = [line for line in lines if line["event"] == "start"]
    plan = {name: start["plan"][name] for name in ("batch_size", "global_batch_size", "total_steps", "learning_rate")}
    faults = [line["action"] for line in lines if line["event"] == "fault"]
    losses = [[line["loss"] for line in lines if line["event"] == event] for event in ("train", "eval")]
    return plan, faults, *losses  # type: ignore[return-value]


@pytest.mark.parametrize("habit", HABITS)
def test_the_first_steps_are_alike(habit: str) -> None:
    assert [ended.error for ended in run_all(*HABITS[habit])] == [""] * 3
    plan, faults, losses, evaluated = read_findings(1)
    assert len(losses) == len(evaluated) == 2
    for workers in (2, 3):
        alike = read_findings(workers)
        assert alike[:2] == (plan, faults)
        assert alike[2] == pytest.approx(losses, rel=2e-3)
        assert alike[3] == pytest.approx(evaluated, rel=2e-3)
        assert alike[2][0] == pytest.approx(losses[0], rel=1e-6), "bf16 weights have moved since, to rounding"


def test_where_not_one_sample_fits_several_workers_are_told_of_sharding() -> None:
    one, *several = run_all({"model": "tests.support.awkward_models:greedy"}, ["model.args.training=0"])
    assert (one.kind, "micro-batches of 1 (one sample)" in one.error) == ("TrainingError", True)
    assert [(ended.kind, "--multi-gpu fsdp" in ended.error) for ended in several] == [("RequestError", True)] * 2
    assert not any(Path(f"run{workers}").exists() for workers in (1, 2, 3))


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refusal_says_the_same(reason: str) -> None:
    flags, sets, said = REFUSED[reason]
    ends = run_all(flags, sets)
    assert said in ends[0].error
    assert [(ended.kind, ended.error) for ended in ends] == [(ends[0].kind, ends[0].error)] * 3
    assert not any(Path(f"run{workers}").exists() for workers in (1, 2, 3))
