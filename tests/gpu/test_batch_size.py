"""--batch-size auto on simulated GPUs of little memory: the largest that fits, and nothing of the search remains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from multigpu_cli.distributed import world
from multigpu_cli.monitor import journal
from multigpu_cli.optimizers import trial
from multigpu_cli.run import batch_size
from tests.gpu.simulated.gpus import each_rank, train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import Gpu, Machine

MIB = 2**20
RUN: dict[str, Any] = {
    "model": "tests.gpu.networks:wide",  # a sample keeps 1 MiB for backward: 8 layers of 32,768 numbers
    "sets": ("model.args.width=32768", "model.args.depth=8"),
    "batch_size": "auto",
    "amp": "off",
    "max_steps": 3,
    "data_on_device": "off",
    "num_workers": 0,
}

KINDS = {"all_gather_single": world, "reduce_scatter_single": world, "all_reduce": dist, "all_to_all_single": dist}
"""The collectives that NCCL has memory for, and where they are called from."""


class Trial(NamedTuple):
    """A micro-batch that the rehearsal has run: whether it had room, and the most memory that was in use by then."""

    size: int
    fits: bool
    peak: int


def noting(folder: Path) -> Callable[[Simulated], None]:
    """Each rank writes down its trials."""

    def prepare(sim: Simulated) -> None:
        real = batch_size._run_micro_batch

        def run(components: Any, size: int) -> None:
            fits = False
            try:
                real(components, size)
                fits = True
            finally:
                device = components.world.device.index
                with (folder / f"{device}.txt").open("a") as file:
                    print(size, int(fits), sim.device.memory(device)["peak"], file=file)

        batch_size._run_micro_batch = run

    return prepare


def read_trials(folder: Path, device: int = 0) -> list[Trial]:
    lines = (folder / f"{device}.txt").read_text().splitlines()
    return [Trial(int(size), fits == "1", int(peak)) for size, fits, peak in map(str.split, lines)]


def plan_of(run: Path) -> dict[str, Any]:
    return dict(
        next(event for event in journal.read_events(run / "journal.jsonl") if event["event"] == "start")["plan"]
    )


@pytest.mark.parametrize("memory", [15 * MIB, 30 * MIB])
def test_the_largest_power_of_two_that_fits_is_taken(
    memory: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the memory that others leave: the card has forty times as much."""

    def prepare(sim: Simulated) -> None:
        noting(tmp_path)(sim)
        real = torch.cuda.mem_get_info
        patch.object(torch.cuda, "mem_get_info", lambda device: (real(device)[0], 40 * memory)).start()

    flags = RUN | {"save_dir": str(tmp_path / "run"), "multi_gpu": "none", "screen": "normal"}
    ended = train_on_gpus(machine=Machine.of(1, memory=memory), prepare=prepare, **flags)
    assert not ended.error, ended.error
    *_, best, too_many = trials = {trial.size: trial for trial in read_trials(tmp_path)}.values()
    assert [trial.size for trial in trials] == [2**power for power in range(len(trials))]
    assert (best.fits, too_many.fits) == (True, False)
    plan = plan_of(tmp_path / "run")
    assert (plan["batch_size"], plan["global_batch_size"]) == (best.size, best.size)
    said = " ".join("".join(capfd.readouterr()).split())
    assert f"{best.size} global batch (measured: {too_many.size} does not fit)" in said
    assert ended.summary["faults"] == []
    (peak,) = ended.summary["peak_memory_bytes"]
    assert peak < too_many.peak, "that of the steps, not of the search"


def test_the_search_leaves_room_and_takes_a_step_of_the_optimizer(tmp_path: Path) -> None:
    """And of its step nothing remains: the run is that of the same size, given."""

    def rehearsals(sim: Simulated) -> None:
        def rehearse(optimizer: Any) -> None:
            real(optimizer)
            with (tmp_path / "rehearsed.txt").open("a") as file:
                print(sim.device.memory(0)["capacity"] - sim.device.memory(0)["reserved"], file=file)

        real = trial.rehearse_step
        patch.object(batch_size, "rehearse_step", rehearse).start()

    memory = 28 * MIB
    one = Machine.of(1, memory=memory)
    found = train_on_gpus(machine=one, prepare=rehearsals, **RUN | {"save_dir": str(tmp_path / "found")})
    assert not found.error, found.error
    size, left = plan_of(tmp_path / "found")["batch_size"], (tmp_path / "rehearsed.txt").read_text().split()
    enough, too_little = map(int, left[size.bit_length() - 2 :])  # counted from two samples on
    assert enough >= 0.08 * memory > too_little > 0, "twice as many had fit, too"
    given = train_on_gpus(machine=one, **RUN | {"save_dir": str(tmp_path / "given"), "batch_size": size})
    assert given.summary["fingerprint"] == found.summary["fingerprint"] is not None


@pytest.mark.parametrize("exact", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_search_comes_after_all_that_nccl_takes(exact: bool, tmp_path: Path) -> None:
    """Which it takes for each kind of collective when one first comes."""

    def note(sim: Simulated) -> None:
        called: list[str] = []
        for kind, owner in KINDS.items():
            _note_calls(owner, kind, called)
        real = batch_size._find_largest_micro_batch

        def find(components: Any) -> None:
            (tmp_path / f"{components.world.rank}.txt").write_text(" ".join(called))
            real(components)

        batch_size._find_largest_micro_batch = find

    small = {"sets": ("model.args.width=64", "model.args.depth=1"), "max_steps": 1}
    ended = train_on_gpus(2, prepare=note, **RUN | small | {"exact": exact, "save_dir": str(tmp_path / "run")})
    assert not ended.error, ended.error
    for rank in range(2):
        assert set([*KINDS][: 3 + exact]) <= set((tmp_path / f"{rank}.txt").read_text().split())


def test_each_group_has_collectives_of_its_own() -> None:
    """With --shard-size, say: NCCL takes their memory once more."""

    def work(sim: Simulated, alone: world.World) -> list[str]:
        called, group = [], dist.new_group([0])
        for kind, owner in KINDS.items():
            patch.object(owner, kind, lambda *_, group, kind=kind: called.append((kind, group))).start()
        world.connect_collectives(alone, [group], pairs=True)
        return [kind for kind, where in called if where is group]

    (called,) = each_rank(1, work)
    assert set(called) == set(KINDS)


def _note_calls(owner: Any, name: str, called: list[str]) -> None:
    real = getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        called.append(name)
        return real(*given, **named)

    setattr(owner, name, noted)


def test_gpus_of_unlike_memory_take_what_fits_the_smaller(tmp_path: Path) -> None:
    machine = Machine((Gpu(memory=60 * MIB), Gpu(memory=20 * MIB)))
    ended = train_on_gpus(2, machine=machine, prepare=noting(tmp_path), save_dir=str(tmp_path / "run"), **RUN)
    assert not ended.error, ended.error
    larger, smaller = read_trials(tmp_path, 0), read_trials(tmp_path, 1)
    plan, tried = plan_of(tmp_path / "run"), [trial.size for trial in smaller if trial.fits]
    assert (plan["batch_size"], plan["global_batch_size"]) == (max(tried), 2 * max(tried))
    assert any(trial.size > max(tried) and trial.fits for trial in larger), "the larger one had room for more"


def test_a_dry_run_measures_it_too_on_one_of_the_gpus_and_writes_nothing(tmp_path: Path) -> None:
    two = Machine(tuple(Gpu(memory=30 * MIB) for _ in range(2)))
    plan = train_on_gpus(1, machine=two, **RUN, dry_run=True, save_dir=str(tmp_path / "run")).summary
    run = train_on_gpus(1, machine=Machine((Gpu(memory=30 * MIB),)), **RUN, save_dir=str(tmp_path / "one")).summary
    assert (plan["workers"], plan["batch_size"]) == (2, run["global_batch_size"])
    assert plan["tried"].startswith(f"forward and backward with {plan['batch_size']} samples")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
