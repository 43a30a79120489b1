"""All-reduces between real processes, and what their figures mean."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from multigpu_cli.commands.doctor import bandwidth
from multigpu_cli.commands.doctor.bandwidth import all_gather, judge_allreduce, measure_allreduce, reduce_scatter
from multigpu_cli.distributed.world import World
from tests.support.ranks import run_on_each_rank


def test_three_workers_measure_themselves_and_their_pairs() -> None:
    found, other, _ = run_on_each_rank(3, measure_allreduce)
    assert (found["workers"], found["backend"], found["wrong"]) == (3, "gloo", [])
    assert 0 < found["latency"] < found["by_size"][-1][1]
    assert [(one, two, wrong) for one, two, _, wrong in found["pairs"]] == [(0, 1, False), (0, 2, False), (1, 2, False)]
    assert other["pairs"] == found["pairs"]
    assert {name: [size for size, seconds in by_size if seconds > 0] for name, by_size in found["halves"].items()} == {
        "all-gather": [2**18, 2**20, 2**24],
        "reduce-scatter": [2**18, 2**20, 2**24],
    }
    assert next(judge_allreduce(found)).verdict == "ok"


@pytest.mark.slow
def test_a_planted_delay_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of a second in one rank's all-reduce is in everybody's latency."""
    real = dist.all_reduce

    def late(value: Tensor, *args: Any, **named: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.01)
        return real(value, *args, **named)

    monkeypatch.setattr(dist, "all_reduce", late)
    monkeypatch.setattr(bandwidth, "_SIZES", {"cpu": (2**10, 2**10, 2**10)})
    found = run_on_each_rank(2, measure_allreduce)[0]
    assert 0.01 <= found["latency"] < 0.03


def test_a_wrong_sum_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.all_reduce

    def lossy(value: Tensor, *args: Any, **named: Any) -> Any:
        done = real(value, *args, **named)
        if dist.get_rank() == 1 and value.numel() == 100_003:
            value[77] += 1
        return done

    def wrong(world: World) -> Any:
        monkeypatch.setattr(dist, "all_reduce", lossy)
        return measure_allreduce(world)

    monkeypatch.setattr(bandwidth, "_SIZES", {"cpu": (2**10, 2**10, 2**10)})
    found = run_on_each_rank(2, wrong)[0]
    assert found["wrong"] == [1]
    assert next(judge_allreduce(found)).verdict == "fail"


def make_record(**changed: Any) -> dict[str, Any]:
    pairs = [[one, other, 1e-3, False] for one in range(4) for other in range(one + 1, 4)]
    halves = {name: [[2**28, seconds]] for name, seconds in {"all-gather": 2e-3, "reduce-scatter": 4e-3}.items()}
    found = {"backend": "nccl", "workers": 4, "wrong": [], "latency": 2e-5, "pairs": pairs, "halves": halves}
    return found | {"by_size": [[2**20, 1e-4], [2**24, 1e-3], [2**28, 4e-3]]} | changed


def test_the_bandwidth_is_that_of_the_bus() -> None:
    """2 (n-1)/n × bytes / seconds, as nccl-tests count it."""
    assert next(judge_allreduce(make_record())).evidence.startswith(
        f"4 workers: 20 µs for 8 bytes, {1.5 * 2**28 / 4e-3 / 1e9:.3g} GB/s over 256 MiB"
    )


def test_a_gather_and_a_scatter_send_half_as_many_bytes() -> None:
    halves = list(judge_allreduce(make_record()))[1:3]
    assert [(half.name, half.evidence) for half in halves] == [
        ("all-gather (nccl)", f"4 workers: {0.75 * 2**28 / 2e-3 / 1e9:.3g} GB/s over 256 MiB"),
        ("reduce-scatter (nccl)", f"4 workers: {0.75 * 2**28 / 4e-3 / 1e9:.3g} GB/s over 256 MiB"),
    ]


def test_each_worker_gets_its_part_of_a_sum_and_all_parts_of_a_gather() -> None:
    def collect_parts(world: World) -> list[list[float]]:
        summed, gathered = torch.arange(6.0) * 10**world.rank, torch.full((6,), float(world.rank))
        reduce_scatter(summed)
        all_gather(gathered)
        return [summed.chunk(3)[world.rank].tolist(), gathered.tolist()]

    parts = [[0.0, 111.0], [222.0, 333.0], [444.0, 555.0]]
    assert run_on_each_rank(3, collect_parts) == [[part, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] for part in parts]


def test_a_pair_that_is_off_is_named() -> None:
    every = make_record()["pairs"]
    slow = [[*pair[:2], 5e-3, False] if pair[:2] == [1, 3] else pair for pair in every]
    found = list(judge_allreduce(make_record(pairs=slow)))[-1]
    assert (found.verdict, found.evidence) == ("warn", "usual 16.8 GB/s, but 1-3 3.36 GB/s")
    wrong = [[*pair[:3], pair[:2] == [0, 2]] for pair in every]
    found = list(judge_allreduce(make_record(pairs=wrong)))[-1]
    assert (found.verdict, "0-2 wrong" in found.evidence) == ("fail", True)
