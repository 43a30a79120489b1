"""--exact under --amp off: GPUs with the kernels of the CPU come to its bits, by whatever path they take.

Sharded, too: these GPUs round the end of a tensor otherwise, as the CPU does.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor

from multigpu_cli.distributed.world import World
from multigpu_cli.strategies.exact import ExactReduction
from multigpu_cli.strategies.fsdp.exact import RowSum
from tests.gpu.simulated import gpus
from tests.gpu.simulated.machine import Gpu, Machine
from tests.support.run_training import run_training

SMALL = ["model.args.depth=1", "model.args.heads=2", "model.args.width=16", "model.args.dropout=0.2"]
RUNS: dict[str, dict[str, Any]] = {
    "perceptron": {"epochs": 1},
    "attention": {
        "data": "tests.support.user_code:sentences",
        "model": "gpt",
        "task": "language-model",
        "epochs": 1,
        "sets": SMALL,
    },
    "convolution": {"data": "digits", "model": "convnet", "max_steps": 4, "ema": "0.9", "max_grad_norm": 0.1},
    "sgd": {"optimizer": "sgd", "epochs": 1},
}
EXACT: dict[str, Any] = {"exact": True, "amp": "off", "batch_size": 5, "global_batch_size": 20, "log_interval": 1}


@pytest.mark.parametrize("what", RUNS)
def test_gpus_come_to_the_bits_of_the_cpu(what: str, tmp_path: Path) -> None:
    flags = EXACT | RUNS[what]
    on_cpu = run_training(1, **flags, save_dir=str(tmp_path / "cpu"))
    on_gpus = [
        gpus.train_on_gpus(count, machine=Machine.of(count), **flags, save_dir=str(tmp_path / f"gpu{count}"))
        for count in (1, 2)
    ]
    sharded = {"multi_gpu": "fsdp", "machine": Machine.of(3), "save_dir": str(tmp_path / "sharded")}
    on_gpus.append(gpus.train_on_gpus(3, **flags | sharded))
    assert [ended.error for ended in (on_cpu, *on_gpus)] == [""] * 4
    assert {ended.summary["device"] for ended in on_gpus} == {Gpu().name}
    assert {ended.summary["fingerprint"] for ended in on_gpus} == {on_cpu.summary["fingerprint"]}


def test_two_workers_add_by_themselves_too(tmp_path: Path) -> None:
    """A library's sum of two may flush the smallest numbers, as a switch that adds in the network could."""

    def refuse(sim: Any) -> None:
        real = ExactReduction._sum_over_workers

        def add(*given: Any) -> Tensor:
            with patch.object(dist, "all_reduce", side_effect=AssertionError("the library's sum")):
                return real(*given)

        patch.object(ExactReduction, "_sum_over_workers", add).start()

    ended = gpus.train_on_gpus(2, prepare=refuse, **EXACT | {"max_steps": 2, "save_dir": str(tmp_path)})
    assert not ended.error, ended.error


def test_the_tree_of_a_sharded_sum_lies_on_one_stream() -> None:
    """Memory that one stream frees, it may use again while another still reads it."""

    def work(sim: Any, world: World) -> tuple[int, list[float], list[float]]:
        rows, side, seen = RowSum(2), torch.cuda.Stream(), set[int]()
        real, group = rows._push, dist.distributed_c10d._get_default_group()

        def push(leaves: Tensor) -> None:
            seen.add(torch.cuda.current_stream().stream_id)
            real(leaves)

        patch.object(rows, "_push", push).start()
        rows.begin_step(8)
        sums = [torch.empty(3, device=world.device) for _ in range(4)]
        for passed in range(4):
            if passed % 2 == 0:  # called twice and reduced once, and not at all in every other pass
                rows.note_forward()
                rows.note_forward()
                with torch.cuda.stream(side):
                    rows(sums[passed], torch.full((6,), world.rank + 1.0, device=world.device), group, None)
            rows.end_pass()
        rows.finish_step()
        rows(sums[1], torch.ones(6, device=world.device), group, None)  # outside of a step nothing is summed
        rows.finish_step()
        return len(seen), sums[0].tolist(), sums[1].tolist()

    assert gpus.each_rank(2, work) == [(1, [6.0] * 3, [0.0] * 3)] * 2


def test_what_chooses_a_kernel_is_pinned(tmp_path: Path) -> None:
    run = EXACT | {"save_dir": str(tmp_path / "run"), "machine": Machine.of(1)}
    assert not gpus.train_on_gpus(1, max_steps=1, **run).error
    pins = json.loads(next(tmp_path.glob("run/checkpoints/*/manifest.json")).read_text())["pins"]["machine"]
    assert {"CUDA version", "cuDNN version", "driver", "number of multiprocessors"} < pins.keys()
    assert pins["number of multiprocessors"] == 132

    def other(sim: Any) -> None:
        torch.cuda.get_device_properties(0).multi_processor_count = 78

    refused = gpus.train_on_gpus(1, prepare=other, max_steps=2, **run)
    assert refused.kind == "RequestError"
    assert "was started with number of multiprocessors 132, here it is 78: bits would differ" in refused.error


@pytest.mark.parametrize("exact", [False, True])
def test_a_gpu_that_was_nearly_full_is_a_warning_for_exact(exact: bool, tmp_path: Path) -> None:
    """cuDNN then takes a kernel that needs less memory, and says nothing."""

    def retry(sim: Any) -> None:
        library: Any = torch._C
        real = library._cuda_memoryStats
        library._cuda_memoryStats = lambda number: real(number) | {"num_alloc_retries": 1}

    flags = EXACT | {"exact": exact, "save_dir": str(tmp_path), "max_steps": 3}
    ended = gpus.train_on_gpus(1, machine=Machine.of(1), prepare=retry, **flags)
    assert not ended.error, ended.error
    assert [fault["kind"] for fault in ended.summary["faults"]] == ["exact"] * exact
