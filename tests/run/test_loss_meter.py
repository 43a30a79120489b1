"""The mean loss of many steps: that of plain arithmetic, to the last bit on any number of workers and after a kill."""

import json
import math
import time
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from multigpu_cli.checkpoint.snapshot import Progress
from multigpu_cli.distributed.world import World
from multigpu_cli.monitor import journal
from multigpu_cli.run import run
from multigpu_cli.run.run import LossMeter
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import run_training
from tests.support.user_code import sentences
from tests.support.world import ALONE

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {
    "batch_size": 5, "global_batch_size": 25, "epochs": 4, "log_interval": 4, "lr": 0.05
}  # fmt: skip
PER_EPOCH = [25, 25, 10]


def lines(folder: str) -> dict[int, dict[str, Any]]:
    """The train lines by step; the last one of a step counts."""
    return {
        event["step"]: event for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] == "train"
    }


def means(folder: str) -> dict[int, float]:
    return {step: line["mean_loss"] for step, line in lines(folder).items()}


def compute_mean(losses: dict[int, float], weights: dict[int, int], steps: range) -> float:
    return math.fsum(losses[step] * weights[step] for step in steps) / sum(weights[step] for step in steps)


def test_many_losses_are_packed_into_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MAX_UNPACKED", 2)
    losses, values = LossMeter(ALONE, Progress(), 3), [torch.tensor(1.0) for _ in range(3)]
    first = weakref.ref(values[0])
    losses.add(0, 3, dict(enumerate(values)), 3)
    values.clear()
    assert first() is None, "small tensors hold whole blocks of a GPU's memory"
    losses.all_reduce_pending()
    assert losses.last == 1


def test_a_recent_loss_is_read_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    losses = LossMeter(ALONE, Progress(), 3)
    assert losses.peek() is None
    losses.add(0, 4, {0: torch.tensor(3.0), 1: torch.tensor([5.0])}, 32)
    assert losses.peek() == 8 * 2 / 32, "half of the micro-batches are this worker's"
    losses.add(1, 4, {0: torch.tensor(1.0), 1: torch.tensor(2.0)}, torch.tensor(8))
    now[0] += 0.9
    assert losses.peek() == 0.5
    now[0] += 0.1
    assert losses.peek() == 0.75
    losses.add(2, 1, {0: torch.tensor(3.0)}, torch.tensor(2))
    now[0] += 1
    assert losses.peek() == 1.5
    losses.all_reduce_pending()
    assert losses.peek() is None, "the reduced loss is the better one"


class OnGpu(torch.Tensor):
    is_cuda = True


def test_a_loss_that_is_on_its_way_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    event, arrived = Mock(), Mock(return_value=False)
    event.query.return_value = False
    event.record.side_effect = lambda: event.configure_mock(query=arrived)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    host = Mock()
    host.copy_.return_value = torch.tensor(3.0)
    monkeypatch.setattr(run, "empty_on_host", lambda _: host)
    losses = LossMeter(ALONE, Progress(), 3)
    losses.add(0, 1, {0: torch.tensor(3.0).as_subclass(OnGpu)}, 1)
    assert losses.peek() is None
    assert host.copy_.call_args.kwargs == {"non_blocking": True}
    arrived.return_value = True
    assert losses.peek() == 3


@pytest.mark.parametrize("loose", [1000, 2])
def test_each_step_counts_by_its_units_and_each_epoch_for_itself(loose: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MAX_UNPACKED", loose)
    progress = Progress()
    losses = LossMeter(ALONE, progress, 3)
    losses.all_reduce_pending()
    assert math.isnan(losses.pop_mean_since_log())
    losses.add(0, 2, {0: torch.tensor(1.0), 1: torch.tensor([2.0])}, 4)
    losses.add(1, 2, {0: torch.tensor(math.inf), 1: torch.tensor(-math.inf)}, 4)
    losses.all_reduce_pending()
    assert math.isnan(losses.last)
    losses.add(2, 1, {0: torch.tensor(1.5, dtype=torch.float64)}, 1)
    losses.all_reduce_pending()
    assert (losses.last, progress.last["train_loss"]) == (1.5, 4.5 / 5)
    losses.add(3, 1, {0: torch.tensor(8.0)}, 4)
    losses.all_reduce_pending()
    assert (losses.last, progress.last["train_loss"]) == (2.0, 2.0), "another epoch"
    assert losses.pop_mean_since_log() == 12.5 / 9
    assert math.isnan(losses.pop_mean_since_log())


def test_workers_with_some_of_a_step_or_none_of_it_agree() -> None:
    values = torch.rand(40, 5, generator=torch.Generator().manual_seed(0))

    def work(world: World) -> tuple[float, ...]:
        progress = Progress()
        losses = LossMeter(world, progress, 10)
        for step, row in enumerate(values):
            count = 5 if step % 10 else 2
            share = range(count * world.rank // world.size, count * (world.rank + 1) // world.size)
            losses.add(step, count, {number: row[number] for number in share}, count)
            if step % 7 == world.size:
                losses.all_reduce_pending()
        losses.all_reduce_pending()
        return losses.last, losses.pop_mean_since_log(), progress.last["train_loss"]

    alone = work(ALONE)
    assert run_on_each_rank(3, work) == [alone] * 3
    counted = [row[: 5 if step % 10 else 2] for step, row in enumerate(values.double())]
    assert alone[1] == pytest.approx(float(torch.cat(counted).mean()), rel=1e-14)
    assert alone[2] == pytest.approx(float(torch.cat(counted[30:]).mean()), rel=1e-14)


def test_a_line_has_the_mean_since_the_line_before_and_the_summary_that_of_the_last_epoch() -> None:
    run_training(**RUN | {"log_interval": 1}, save_dir="each", exact=True)
    each = {step: line["loss"] for step, line in lines("each").items()}
    sizes = {step: PER_EPOCH[(step - 1) % 3] for step in each}
    finals = []
    for workers in (1, 3):
        folder = f"on{workers}"
        finals.append(run_training(workers, **RUN, save_dir=folder, exact=True).summary["final"]["train_loss"])
        assert means(folder) == {
            step: pytest.approx(compute_mean(each, sizes, range(step - 3, step + 1)), rel=1e-12) for step in (4, 8, 12)
        }
        assert {step: line["loss"] for step, line in lines(folder).items()} == {step: each[step] for step in (4, 8, 12)}
        assert means(folder) == means("on1"), "to the last bit"
    assert finals == [finals[0]] * 2
    assert finals[0] == pytest.approx(compute_mean(each, sizes, range(10, 13)), rel=1e-12)


def test_tokens_count_as_often_as_there_are() -> None:
    """Samples have from nine tokens down to none."""
    flags = {"data": "tests.support.user_code:sentences", "model": "gpt", "task": "language-model", "num_workers": 0}
    sets = ["model.depth=1", "model.width=16", "model.heads=2"]
    run_training(**RUN | flags | {"log_interval": 1}, save_dir="each", sets=sets, trace_samples=True)
    run_training(2, **RUN | flags, save_dir="two", sets=sets)
    traced = map(json.loads, Path("each/samples.jsonl").read_text().splitlines())
    targets = sentences("train", 42).tensors[1]
    tokens = {line["step"]: int((targets[line["samples"]] >= 0).sum()) for line in traced}
    each = {step: line["loss"] for step, line in lines("each").items()}
    wanted = {step: compute_mean(each, tokens, range(step - 3, step + 1)) for step in (4, 8, 12)}
    assert means("two") == pytest.approx(wanted, rel=1e-5)
    assert abs(wanted[4] - compute_mean(each, dict.fromkeys(each, 1), range(1, 5))) > 1e-4 * wanted[4], "it matters"


def test_a_kill_between_two_lines_and_in_an_epoch_changes_neither() -> None:
    flags = RUN | {"checkpoint_every": "5", "exact": True}
    undisturbed = run_training(**flags, save_dir="whole").summary["final"]
    deed = {"OWN_DEED": "0:33:SIGKILL"}  # after the rehearsal, and two epochs of twelve passes
    deed["OWN_AFTER"] = "run/checkpoints/step_00000005"
    assert run_training(**flags, save_dir="run", environ=deed).killed == [0]
    ended = run_training(2, **flags, save_dir="run").summary
    assert ended["resumed_from"] == "run/checkpoints/step_00000005"
    assert means("run") == means("whole")
    assert ended["final"] == undisturbed


def test_a_step_that_was_skipped_is_left_out() -> None:
    Path("spoilt.py").write_text(
        """
from tests.support.user_code import tensors

def dataset(split, seed):
    inputs, targets = tensors(split, seed).tensors
    if split == "train":
        inputs[0] = float("nan")
    return list(zip(inputs, targets))
"""
    )
    ended = run_training(2, **RUN | {"log_interval": 3}, save_dir="run", data="spoilt:dataset")
    assert ended.error == ""
    assert all(0 < mean < 3 for mean in means("run").values())
    assert 0 < ended.summary["final"]["train_loss"] < 3
