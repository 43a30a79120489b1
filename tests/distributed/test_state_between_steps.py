"""`after_step` of networks and tasks: queues, teachers, codebooks and annealing on any number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import after_step_models as models
from tests.support.run_training import Ended, run_training

NETWORKS = ("MoCo", "MeanTeacher", "Codebook", "Annealed", "Prototyped")
SIZES = (20, 7, 3)  # one micro-batch in a step of 20 samples, three, seven; with 20 all workers but one are idle
RUN: dict[str, Any] = {"global_batch_size": 20, "epochs": 3, "log_interval": 1, "optimizer": "sgd", "lr": 0.1}

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def train(name: str, workers: int, size: int, folder: str, **more: Any) -> Ended:
    task = f"{models.__name__}:Prototypes" if name == "Prototyped" else "from-model"
    flags = RUN | {"model": f"{models.__name__}:{name}", "task": task, "batch_size": size, "save_dir": folder}
    return run_training(workers, **flags | more)


def fingerprint(ended: Ended) -> str:
    assert ended.error == ""
    assert ended.summary["status"] == "completed"
    return str(ended.summary["fingerprint"])


def read_state(folder: str) -> dict[str, Tensor]:
    return dict(torch.load(f"{folder}/last.pt", weights_only=True)["model"])


def assert_resumes(name: str, chain: tuple[int, ...], size: int, expected: str) -> None:
    """Kill a run in its first steps, and again after each resume on another number of workers."""
    folder = f"killed-{'-'.join(map(str, chain))}"
    for number, workers in enumerate(chain, 1):
        dies = {models.DIES_AFTER: f"{folder}/checkpoints/step_{3 * number:08}"} if number < len(chain) else {}
        ended = train(name, workers, size, folder, exact=True, checkpoint_every="3", environ=dies)
        assert bool(ended.killed) == bool(dies)
    assert ended.summary["resumed_from"] is not None
    assert fingerprint(ended) == expected


def test_codebook_has_equal_bits_on_idle_workers_and_after_a_kill() -> None:
    ended = train("Codebook", 1, 7, "one", exact=True)
    alone = fingerprint(ended)
    assert fingerprint(train("Codebook", 2, 7, "two", exact=True)) == alone
    assert_resumes("Codebook", (2, 1), 7, alone)


def test_queue_follows_the_gathered_keys_of_all_workers() -> None:
    fingerprint(train("MoCo", 2, 7, "several"))
    fingerprint(train("MoCo", 1, 20, "whole"))
    several, whole = read_state("several"), read_state("whole")
    torch.testing.assert_close(several, whole, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NETWORKS)
def test_equal_bits_on_any_workers_through_kill_and_resize(name: str, size: int) -> None:
    ends = {fingerprint(train(name, workers, size, f"{workers}", exact=True)) for workers in (1, 2, 3)}
    assert len(ends) == 1
    assert_resumes(name, (2, 3, 1), size, ends.pop())
    assert_resumes(name, (1, 2), size, fingerprint(train(name, 1, size, "again", exact=True)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("exact", [True, False])
def test_size_of_micro_batches_only_rounds(name: str, exact: bool) -> None:
    fingerprint(train(name, 1, 20, "whole", exact=exact))
    for size in (7, 3):
        fingerprint(train(name, 2, size, f"{size}", exact=exact))
        torch.testing.assert_close(read_state(f"{size}"), read_state("whole"), rtol=0, atol=1e-6)


def test_values_that_differ_between_ranks_end_the_run() -> None:
    ended = train("ByRank", 2, 7, "differing")
    assert ended.kind == "TrainingError"
    assert "the replicas differ at step 3" in ended.error
    assert "differs in weight" in ended.error


def test_sharded_strategy_is_refused_before_anything_is_written() -> None:
    ended = train("MeanTeacher", 2, 7, "sharded", multi_gpu="fsdp")
    assert ended.kind == "RequestError"
    assert "--multi-gpu fsdp gives after_step of model or task only a shard of each weight" in ended.error
    assert not Path("sharded").exists()
