"""The forecast of --multi-gpu fsdp against what two sharded processes hold, and how the command shows it."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import main_multi_gpu
from multigpu_cli.commands.plan import measure as group_timer
from multigpu_cli.commands.plan.measure import build_probed, iterate_micro_batches, measure_worker
from multigpu_cli.commands.plan.plan import note_too_large
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World, all_gather
from multigpu_cli.planning.memory import Memory, shard_memory
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.step import forward_backward
from multigpu_cli.strategies.fsdp import fsdp
from multigpu_cli.strategies.fsdp.probe import list_groups
from tests.support.ranks import run_on_each_rank

GPT = {"data": "benchmarks.workloads:tokens", "batch_size": "4", "multi_gpu": "fsdp"}
REST = 4 * (512 * 128 + 64 * 128 + 128)  # bytes of the weights in no block
CPU = torch.device("cpu")


def take_step(components: TrainComponents, stream: Iterator[Batch], passes: int) -> None:
    """One optimizer step of so many micro-batches on this worker."""
    strategy, state = components.strategy, components.state
    strategy.begin_step(passes * components.world.size)
    for number in range(passes):
        batch = next(stream)
        forward_backward(components, batch, 1.0, last=number == passes - 1)
        strategy.after_backward(batch.micro_batch_index)
    strategy.reduce_gradients(idle=False)
    state.precision.clip_and_step(state.optimizer, strategy.local_parameters, 1.0, strategy.total_norm)
    state.optimizer.zero_grad()


def count_bytes_at_rest(components: TrainComponents) -> int:
    """Bytes of this worker's rows, of its part of the optimizer's state, and of the buffers."""
    states = [value for state in components.state.optimizer.state.values() for value in state.values()]
    return sum(
        value.nbytes
        for value in [*components.strategy.local_parameters, *components.state.model.buffers(), *states]
        if isinstance(value, Tensor)
    )


def measure_peak(world: World, config: Config, folder: Path) -> dict[int, int]:
    """The most bytes of tensors in a step, by the number of its passes: those at rest, and what the step allocates."""
    torch.set_num_threads(1)
    home = folder / str(world.rank)
    components, _ = build_probed(config, Placement("fsdp", (CPU,), 0, "a test"), world, str(home))
    peaks = {}
    with closing(components.loaders.train):
        stream = iterate_micro_batches(components)
        take_step(components, stream, 1)
        for passes in (1, 2):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                take_step(components, stream, passes)
            added = most = 0
            for event in profiled.profiler.kineto_results.events():
                if event.name() == "[memory]":
                    added += event.nbytes()
                    most = max(most, added)
            peaks[passes] = count_bytes_at_rest(components) + most
    return peaks


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, id="forward", marks=pytest.mark.slow),
        pytest.param({"reshard": "step"}, id="step"),
        pytest.param({"exact": True}, id="exact"),
    ],
)
def test_the_forecast_is_what_two_workers_hold(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_timer, "_SECONDS", 0)
    config = resolve(GPT | flags, [], None)
    alone = measure_worker(config, [1])
    assert alone.sharding
    for found in run_on_each_rank(2, lambda world: measure_peak(world, config, tmp_path)):
        for passes, peak in found.items():
            planned = shard_memory(alone.memory, alone.sharding, 2, passes).total_bytes(4)
            assert planned == pytest.approx(peak, rel=0.15), passes


def test_what_is_gathered_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_timer, "_SECONDS", 0)
    alone = measure_worker(resolve(GPT, [], None), [1])
    assert alone.sharding
    block = 4 * (12 * 128**2 + 2 * 128)
    assert (alone.sharding.blocks, alone.sharding.rest) == ((block,) * 4, REST)
    assert list(alone.works[1].messages) == [block] * 4 + [REST]
    assert alone.works[1].sharding is alone.sharding
    assert measure_worker(resolve(GPT | {"multi_gpu": "ddp"}, [], None), [1]).sharding is None


@pytest.mark.parametrize(
    ("wanted", "chosen", "share"), [("auto", "bf16", 0.5), ("auto", "fp32", 1.0), ("fp32", "bf16", 1.0)]
)
def test_what_is_gathered_in_bf16_counts_half(
    wanted: str, chosen: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "choose_param_dtype", lambda *_: chosen)  # a CPU gathers in fp32
    model, world = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), World(CPU)
    config = resolve({"multi_gpu": "fsdp", "amp": "bf16"}, [f"strategy.param_dtype={wanted}"], None)
    components: Any = SimpleNamespace(config=config, world=world, state=SimpleNamespace(model=model))
    found = group_timer.measure_sharding(components)
    assert found
    assert found.share == share


@pytest.mark.slow
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real workers take sharded steps; the memory and the traffic of four are those of the forecast."""
    monkeypatch.setattr(group_timer, "_SECONDS", 0)
    monkeypatch.setattr(group_timer, "count_cores", lambda: 2)
    words = [part for name, value in GPT.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert main_multi_gpu.run(["plan", *words, "--workers", "2,4", "--grad-accum-steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    whole: int = found["memory"]["gradients"]
    two, four = found["sharded"][1:]
    sent = (5 * whole - 2 * REST) / 2  # of two passes, each of which gathers the rest once
    assert (two["workers"], two["passes"], two["sent"], two["sent_by_ddp"]) == (2, 2, sent, whole)
    assert four["memory"]["optimizer"] * 4 == pytest.approx(found["memory"]["optimizer"], rel=1e-3)
    works, wire = found["about"]["works"], found["about"]["wire"]
    assert min(works["2"][name] for name in ("forward", "backward", "commit", "gather", "reduction")) > 0
    assert works["4"]["gather"] is None, "beyond the cores there is nothing to be seen"
    assert "gloo, all-gather and reduce-scatter" in wire


def test_where_one_device_is_too_small_sharding_is_named() -> None:
    memory = Memory(weights=2**30, gradients=2**30, optimizer=2**31, fixed=0, per_sample=2**20)
    assert list(note_too_large(memory, None)) == list(note_too_large(memory, 2**33)) == []
    (said,) = note_too_large(memory, 2**32)
    assert said.startswith("4.00 GiB with a single sample do not fit 4.00 GiB: --multi-gpu fsdp divides")


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_timer, "_SECONDS", 0)
    words: list[Any] = ["--data", GPT["data"], "--batch-size", "4", "--multi-gpu", "fsdp"]
    assert main_multi_gpu.run(["plan", *words, "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "fsdp     forecast, not measured: equal parts of the state" in said
    assert "a step of 1 micro-batch sends 0.00 KiB (ddp 0.00 KiB)" in said


class Clock:
    """A clock that stands still but for what is planted."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Planted:
    """One of FSDP's collectives, which takes a second."""

    def __init__(self, real: Any, clock: Clock) -> None:
        self._real, self.allocate, self._clock = real, real.allocate, clock

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._clock.now += 1
        return self._real(*arguments, **named)


def time_planted_steps(world: World, config: Config, folder: Path) -> list[float]:
    """The forward pass of rank 1 takes ten seconds, and each collective one."""
    components, _ = build_probed(config, Placement("fsdp", (CPU,), 0, "a test"), world, str(folder / str(world.rank)))
    clock = Clock()
    vars(group_timer)["time"] = vars(group_timer)["time"] = clock
    with closing(components.loaders.train):
        components.state.model.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + 10 * world.rank))
        for group in list_groups([components.state.model]):
            group._all_gather_comm = Planted(group._all_gather_comm, clock)
            group._reduce_scatter_comm = Planted(group._reduce_scatter_comm, clock)
        return group_timer.median_step(torch.stack(all_gather(world, group_timer.time_steps(components, world))))


@pytest.mark.parametrize(
    ("flags", "gathers"),
    [pytest.param({}, 5 + 4, id="forward"), pytest.param({"reshard": "step"}, 5, id="step", marks=pytest.mark.slow)],
)
def test_gathering_is_no_part_of_the_passes(
    flags: dict[str, Any], gathers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks are gathered before each pass, the rest before forward; those who step together wait for rank 1."""
    monkeypatch.setattr(group_timer, "_SECONDS", 0)
    config = resolve(GPT | flags, [], None)
    found = run_on_each_rank(2, lambda world: time_planted_steps(world, config, tmp_path))
    assert found == [[0, 10, 0, 0, gathers, 5]] * 2
