"""The size of DDP's buckets by measurement, agreed on by all ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from multigpu_cli.config.schema import CommunicationConfig
from multigpu_cli.distributed.world import World
from multigpu_cli.planning.speedup import buckets
from multigpu_cli.strategies import ddp
from multigpu_cli.strategies.ddp import DEFAULT_CAP, measure_cap
from tests.support.ranks import run_on_each_rank


def test_a_small_model_is_not_measured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "_seconds", None)
    assert measure_cap(nn.Linear(100, 100), World(torch.device("cpu"), size=2)) == DEFAULT_CAP


def test_the_smallest_that_is_about_as_good_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "_seconds", lambda size, world: {1: 2.4, 2: 4.2, 5: 10.0}[size])
    assert measure_cap(nn.Linear(1024, 1600), World(torch.device("cpu"))) == 2


@pytest.mark.parametrize(("mib", "sizes"), [(26, [1, 2, 5, 10, 25]), (25, [1, 2, 5, 10])])
def test_no_bucket_is_tried_that_all_gradients_would_not_fill(
    mib: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(ddp, "_seconds", lambda size, world: tried.append(size) or 1.0)
    model = nn.Linear(1024, 256 * mib, bias=False, device="meta")
    assert measure_cap(model, World(torch.device("cpu"))) == sizes[-1], "where all take as long, the largest is best"
    assert tried == sizes


def test_all_ranks_take_what_the_first_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "_seconds", lambda size, world: size + 2 * world.rank / size)
    found = run_on_each_rank(2, lambda world: measure_cap(nn.Linear(1024, 1600), world))
    assert found == [1, 1]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_fastest_of_a_few_counts_after_a_warm_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the call returns at once, and the device is waited for."""
    now, took, sent = 0.0, iter([9.0, 3.0, 5.0, 4.0]), list[int]()

    def pass_time(_: object) -> None:
        nonlocal now
        now += next(took)

    def send(message: torch.Tensor) -> None:
        sent.append(message.nbytes)
        if kind == "cpu":
            pass_time(message)

    fake = SimpleNamespace(zeros=lambda size, device: torch.zeros(size), cuda=SimpleNamespace(synchronize=pass_time))
    monkeypatch.setattr(ddp, "torch", fake)
    monkeypatch.setattr(ddp, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(ddp, "dist", SimpleNamespace(all_reduce=send))
    assert ddp._seconds(1, World(torch.device(kind))) == 3.0
    assert (sent, list(took)) == ([2**20] * 4, [])


@pytest.mark.parametrize(("cap", "sizes"), [("auto", [2, 6]), (DEFAULT_CAP, [2, 6]), (26, [8]), (5, [6, 2])])
def test_the_default_size_keeps_a_small_first_bucket(cap: int | str, sizes: list[int]) -> None:
    """Its gradients come first, so that their all-reduce starts soon."""

    def list_buckets(world: World) -> list[int]:
        layers = [nn.Linear(724, 724, bias=False) for _ in range(4)]  # 2 MiB each
        strategy = ddp.DDP(nn.Sequential(*layers), world, CommunicationConfig(bucket_cap_mb=cap))
        for _ in range(2):  # DDP assigns gradients to buckets after the first pass
            strategy.callable(torch.ones(1, 724)).sum().backward()
        buckets = strategy._ddp.reducer._get_zeros_like_grad_buckets()
        return [round(bucket.buffer().nbytes / 2**20) for bucket in buckets]

    assert run_on_each_rank(1, list_buckets) == [sizes]


def test_the_plan_forecasts_the_default_buckets() -> None:
    assert buckets(30 * 2**20, DEFAULT_CAP) == buckets(30 * 2**20) == (2**20, 25 * 2**20, 4 * 2**20)
    assert buckets(30 * 2**20, 20) == (20 * 2**20, 10 * 2**20)


def test_a_real_all_reduce_is_timed() -> None:
    found = run_on_each_rank(2, lambda world: measure_cap(nn.Linear(512, 600), world))
    assert found == [1, 1]
