"""The size of DDP's buckets by measurement, agreed on by all ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from multigpu_cli.distributed.world import World
from multigpu_cli.strategies import ddp
from multigpu_cli.strategies.ddp import DEFAULT_CAP, measure_cap
from tests.support.ranks import run_on_each_rank


def test_a_small_model_is_not_measured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "_seconds", None)
    assert measure_cap(nn.Linear(100, 100), World(torch.device("cpu"), size=2)) == DEFAULT_CAP


def test_the_smallest_that_is_about_as_good_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "_seconds", lambda size, world: {1: 1.2, 2: 2.02, 5: 5.0}[size])
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


def test_the_fastest_of_a_few_counts_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = 0.0, iter([9.0, 3.0, 5.0, 4.0])

    def pass_time(message: torch.Tensor) -> None:
        nonlocal now
        assert message.nbytes == 2**20
        now += next(took)

    monkeypatch.setattr(ddp, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(ddp, "dist", SimpleNamespace(all_reduce=pass_time))
    assert ddp._seconds(1, World(torch.device("cpu"))) == 3.0
    assert not list(took)


def test_a_real_all_reduce_is_timed() -> None:
    found = run_on_each_rank(2, lambda world: measure_cap(nn.Linear(512, 600), world))
    assert found == [1, 1]
