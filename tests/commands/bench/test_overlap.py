"""The reduction, overlapped and explicit: the same weights on all ranks, and a planted delay is found."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multigpu_cli.commands import bench_overlap as overlap_module
from multigpu_cli.commands.bench_overlap import Overlap, compare_reductions, measure_overlap, median_overlap
from multigpu_cli.commands.plan.measure import build_probed
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.faults.replica_check import check_replicas
from tests.support.ranks import run_on_each_rank

OWN = {
    "data": "tests.support.user_code:tensors",
    "model": "tests.support.user_code:net",
    "batch_size": "10",
    "lr": "0.01",
}


def test_an_explicit_reduction_is_timed_and_keeps_the_replicas_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that stands still: an all-reduce takes 50 s of it, and DDP's own reduction leaves 20 s uncovered."""
    real, now = dist.all_reduce, [0.0]

    def slow(value: Any, *args: Any, **named: Any) -> Any:
        now[0] += 50
        return real(value, *args, **named)

    def work(world: World) -> list[float]:
        choice = Placement("ddp", (torch.device("cpu"),), 0, "test")
        components, _ = build_probed(resolve(OWN, [], None), choice, world, str(tmp_path / "run"))
        first = [p.detach().clone() for p in components.strategy.local_parameters]
        strategy = components.strategy
        around = strategy.accumulate

        def accumulating(*, last: bool) -> Any:
            now[0] += 120 if last else 100
            return around(last=last)

        strategy.accumulate = accumulating  # type: ignore[method-assign]
        monkeypatch.setattr(overlap_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        monkeypatch.setattr(dist, "all_reduce", slow)
        reduction, exposed = compare_reductions(components, 8)
        monkeypatch.undo()
        check_replicas(components.state.model, world, 8)
        moved = any(
            not torch.equal(p, before) for p, before in zip(components.strategy.local_parameters, first, strict=True)
        )
        return [reduction, exposed, moved]

    assert run_on_each_rank(2, work) == [[50, 20, True]] * 2
    assert not (tmp_path / "run").exists()


def test_a_step_that_reduces_explicitly_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(world: World) -> list[list[float]]:
        choice, found = Placement("ddp", (torch.device("cpu"),), 0, "test"), []
        for apart in (True, False):
            components, _ = build_probed(resolve(OWN, [], None), choice, world, str(tmp_path / "run"))
            if not apart:  # every step is DDP's own
                strategy = components.strategy

                def accumulate(*, last: bool, real: Any = strategy.accumulate) -> Any:
                    return real(last=True)

                strategy.accumulate = accumulate  # type: ignore[method-assign]
                monkeypatch.setattr(overlap_module, "_reduce_gradients", lambda *_: (0.0, 0.0))
            compare_reductions(components, 4)
            found.append(torch.cat([p.detach().flatten() for p in components.strategy.local_parameters]).tolist())
        return found

    for explicit, overlapped in run_on_each_rank(2, work):
        assert explicit == pytest.approx(overlapped, rel=1e-5, abs=1e-7)


def test_where_it_can_not_be_told() -> None:
    for flags in ({"exact": True}, {"grad_compression": "bf16"}, {"find_unused_parameters": True}):
        assert measure_overlap(resolve(OWN | flags, [], None), 2) is None
    assert measure_overlap(resolve(OWN, [], None), 1) is None
    assert median_overlap([None]) is None
    assert median_overlap([Overlap(3.0, 1.0), Overlap(1.0, 0.5), Overlap(2.0, -0.5)]) == Overlap(2.0, 0.5)
