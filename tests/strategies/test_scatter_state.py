"""A state that one rank has read comes to all tensor by tensor: no second copy of it, on the device or the host."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # seconds; DDP imports it, and here it is done once rather than in each forked rank
from torch import nn

from multigpu_cli.checkpoint.pieces import iterate_tensors
from multigpu_cli.config.schema import CommunicationConfig, OptimizerConfig
from multigpu_cli.distributed.world import World
from multigpu_cli.models.build import use_channels_last
from multigpu_cli.models.networks.convnet import ConvNet
from multigpu_cli.optimizers.build import build_optimizer
from multigpu_cli.optimizers.eval_weights import EMAModel
from multigpu_cli.run.assembly import assemble
from multigpu_cli.runtime.module_state import map_tensors
from multigpu_cli.strategies.ddp import DDP
from tests.gpu.simulated.gpus import train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import Machine
from tests.support.ranks import run_on_each_rank

MIB = 2**20


def peak(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def test_on_the_host_a_rank_needs_no_more_than_the_state_itself() -> None:
    def work(world: World) -> float:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))  # 24 MiB
        strategy = DDP(model, world, CommunicationConfig())
        optimizer, state, size = torch.optim.AdamW(model.parameters()), None, 72 * MIB
        if world.is_main:  # as if mapped from a file
            weights = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
            values = enumerate(weights.values())
            moments = {at: {"step": torch.ones(()), "exp_avg": value, "exp_avg_sq": value} for at, value in values}
            groups = optimizer.state_dict()["param_groups"]
            state = {"model": weights, "optimizer": {"state": moments, "param_groups": groups}}
        Path("/proc/self/clear_refs").write_text("5")
        before = peak("VmRSS")
        received = strategy.scatter_state(state, into={"model": model.state_dict()})
        model.load_state_dict(received["model"])
        optimizer.load_state_dict(received["optimizer"])
        first = next(model.parameters())
        assert first.detach().sum().item() == optimizer.state[first]["exp_avg"].sum().item() == 1024**2
        return (peak("VmHWM") - before) / size

    assert max(run_on_each_rank(2, work)) < 1.2


def test_every_value_arrives_in_its_place_and_layout() -> None:
    """Fused kernels ignore strides: the states of a kernel with channels last must lie as it does."""

    def work(world: World) -> list[Any]:
        torch.manual_seed(world.rank)
        model = ConvNet((1, 8, 8), 10, width=8)
        use_channels_last(model)
        average, strategy = EMAModel(model, 0.9), DDP(model, world, CommunicationConfig())
        optimizer = build_optimizer(model, OptimizerConfig())
        model(torch.randn(4, 1, 8, 8)).sum().backward()
        optimizer.step()
        state = {
            "model": model.state_dict(),
            "average": average.state_dict(),
            "optimizer": optimizer.state_dict(),
            "task": {"seen": [1, None, "two"], "sums": torch.full((2, 0), 1.0), "one": torch.tensor(world.rank + 1.0)},
        }
        own = {name: state[name] for name in ("model", "average")}
        received = strategy.scatter_state(state if world.rank == 1 else None, source=1, into=own)
        for name, value in model.state_dict().items():
            assert received["model"][name].data_ptr() == value.data_ptr(), "received where it is"
        model.load_state_dict(received["model"])
        average.load_state_dict(received["average"])
        optimizer.load_state_dict(received["optimizer"])
        for parameter, moved in optimizer.state.items():
            assert moved["exp_avg"].stride() == parameter.stride()
        now = [model.state_dict(), average.state_dict(), optimizer.state_dict(), received["task"]]
        return [map_tensors(part, lambda _, value: (value.tolist(), str(value.dtype))) for part in now]

    one, other = run_on_each_rank(2, work)
    assert one == other
    assert one[-1] == {"seen": [1, None, "two"], "sums": ([[], []], "torch.float32"), "one": (2.0, "torch.float32")}


def test_a_state_of_another_model_leaves_the_weights_as_they_were() -> None:
    """Whoever loads it says what differs; a model of the user's own is still theirs."""

    def work(world: World) -> tuple[float, list[int]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
        nn.init.zeros_(next(model.parameters()))
        strategy = DDP(model, world, CommunicationConfig())
        other = {"model": {name: torch.ones(2, 2) for name in model.state_dict()}}
        received = strategy.scatter_state(other, into={"model": model.state_dict(), "average": {}})
        return next(model.parameters()).detach().sum().item(), list(received["model"]["1.weight"].shape)

    assert run_on_each_rank(2, work) == [(0.0, [2, 2])] * 2


def layers(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """4 MiB of weights; with AdamW 12 MiB of state."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)))
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 512), blocks, nn.Linear(512, num_classes))


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resume_takes_no_more_of_a_gpu_than_a_step(exact: bool, tmp_path: Path) -> None:
    """And of the host next to nothing for a rank: only its file is there, once for all of a machine."""

    def note(sim: Simulated) -> None:
        real = assemble._restore_checkpoint

        def restore(*given: Any) -> None:
            strategy, world, on_host = given[1], given[-1], []
            scatter = strategy.scatter_state

            def note_host(*state: Any, **how: Any) -> Any:
                received = scatter(*state, **how)
                on_host.append(sum(each.nbytes for each in iterate_tensors(received) if not each.is_cuda))
                assert not any(each.is_cuda for each in iterate_tensors(received["optimizer"]) if not each.ndim)
                return received

            sim.device.reset_peak(world.device.index)
            with patch.object(strategy, "scatter_state", note_host):
                real(*given)
            most = sim.device.memory(world.device.index)["peak"]
            (tmp_path / f"{world.rank}.txt").write_text(f"{most} {on_host[0]}")

        patch.object(assemble, "_restore_checkpoint", restore).start()

    run: dict[str, Any] = {"model": f"{__name__}:layers", "batch_size": 2, "global_batch_size": 4}
    run |= {"amp": "off", "exact": exact, "save_dir": str(tmp_path / "run"), "data_on_device": "off"}
    two = Machine.of(2, memory=1024 * MIB)
    first = train_on_gpus(2, machine=two, max_steps=2, **run)
    assert not first.error, first.error
    again = train_on_gpus(2, machine=two, prepare=note, max_steps=3, **run)
    assert not again.error, again.error
    for rank, most in enumerate(first.summary["peak_memory_bytes"]):
        on_gpu, on_host = map(int, (tmp_path / f"{rank}.txt").read_text().split())
        assert on_gpu <= most
        assert on_host < MIB
