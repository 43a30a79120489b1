"""What the device refuses, before the data is opened."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.fsdp

from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.run.request.checks import check_device
from multigpu_cli.strategies.fsdp.rules import RULES


def test_losses_of_replicas_have_no_weights_with_dp() -> None:
    gpus, config = (torch.device("cuda", 0), torch.device("cuda", 1)), resolve({"task": "from-model"}, (), None)
    for strategy, count in (("dp", 1), ("ddp", 0)):
        found = check_device(config, Placement(strategy, gpus, 0, "as asked"), World(torch.device("cpu")))
        assert sum("--task from-model can't be used with --multi-gpu dp" in str(error) for error in found) == count


def test_statistics_over_workers_are_for_gpus_and_a_sharded_model_takes_no_environments() -> None:
    sync, ppo = resolve({"sync_bn": True, "amp": "off"}, (), None), resolve({"task": "ppo"}, (), None)
    for config, strategy, kind, refused in ((sync, "ddp", "cuda", 0), (sync, "ddp", "cpu", 1), (ppo, "fsdp", "cpu", 1)):
        device = torch.device(kind)
        found = check_device(config, Placement(strategy, (device,), 0, "as asked"), World(device))
        assert len(list(found)) == refused


@pytest.mark.parametrize(("launched", "size"), [(3, 1), (0, 3)], ids=["in the launcher", "in a worker"])
def test_groups_must_divide_the_workers(launched: int, size: int) -> None:
    cpu, config = torch.device("cpu"), resolve({"multi_gpu": "fsdp", "shard_size": 2}, (), None)
    [error] = check_device(config, Placement("fsdp", (cpu,), launched, "as asked"), World(cpu, 0, size))
    assert "3 workers can't be divided into groups of 2" in str(error)


@pytest.mark.parametrize(
    ("workers", "groups", "sizes"), [(6, 4, "2 or 3 or 6"), (2, 3, "2"), (6, 3, None), (1, 3, None), (None, 3, None)]
)
def test_groups_that_would_fit_are_named(workers: int | None, groups: int, sizes: str | None) -> None:
    """Without a number of workers there may be one."""
    config = resolve({"multi_gpu": "fsdp", "shard_size": groups, "nproc_per_node": workers}, (), None)
    assert [(error.problem, error.remedy) for rule in RULES for error in rule.check(config)] == (
        [
            (
                f"--shard-size {groups}: {workers} workers can't be divided into groups of {groups}",
                f"--shard-size {sizes}; with {workers} all workers are one group",
            )
        ]
        if sizes
        else []
    )


def test_a_torch_that_cannot_do_it_with_sharded_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")

    def refuse() -> list[str]:
        request = resolve({"batch_size": "auto", "find_unused_parameters": True}, (), None)
        errors = check_device(request, Placement("fsdp", (cpu,), 0, "as asked"), World(cpu))
        return [str(error) for error in errors]

    assert refuse() == []
    monkeypatch.setattr(torch.distributed.fsdp, "FSDPModule", SimpleNamespace())
    sums, unused, tries = refuse()
    assert "--find-unused-parameters can't be used with --multi-gpu fsdp" in unused
    assert "can't sum gradients" in sums
    assert "--batch-size auto can't be used with --multi-gpu fsdp" in tries
