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
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import run_training

SMALL = ["model.args.depth=1", "model.args.heads=2", "model.args.width=16", "model.args.dropout=0.2"]
RUNS: dict[str, dict[str, Any]] = {
    "perceptron": {"epochs": 1},
    "attention": {
        "data": "tests.support.user_code:sentences",
        "model": "gpt",
        "task": "language-model",
        "max_steps": 2,
        "sets": SMALL,
    },
    "convolution": {
        "data": "digits",
        "model": "convnet",
        "max_steps": 3,
        "ema": "0.9",
        "max_grad_norm": 0.1,
        "sets": ["data.args.val_fraction=0.02", "data.args.test_fraction=0.02", "model.args.stages=2"],
    },
    "sgd": {"optimizer": "sgd", "max_steps": 2},
}
EXACT: dict[str, Any] = {"exact": True, "amp": "off", "batch_size": 5, "global_batch_size": 20, "log_interval": 1}


@pytest.mark.parametrize("what", [pytest.param("perceptron", marks=pytest.mark.slow), *[*RUNS][1:]])
def test_gpus_come_to_the_bits_of_the_cpu(what: str, tmp_path: Path) -> None:
    flags = EXACT | RUNS[what]
    on_cpu = run_training(1, **flags, save_dir=str(tmp_path / "cpu"))
    on_gpus = [
        gpus.train_on_gpus(count, machine=Machine.of(count), **flags, save_dir=str(tmp_path / f"gpu{count}"))
        for count in {"convolution": (1, 2), "sgd": ()}.get(what, (2,))
    ]
    sharded = {"multi_gpu": "fsdp", "machine": Machine.of(3), "save_dir": str(tmp_path / "sharded")}
    on_gpus.append(gpus.train_on_gpus(3, **flags | sharded))
    assert {ended.error for ended in (on_cpu, *on_gpus)} == {""}
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

    def work(sim: Any, world: World) -> tuple[list[int], list[tuple[int, int]], list[bool], list[float]]:
        rows, side, ours = RowSum(2), torch.cuda.Stream(), torch.cuda.current_stream()
        names, streams, waits, waiting = {side.stream_id: 1, ours.stream_id: 0}, list[int](), list[Any](), list[bool]()
        output = torch.full((3,), 9.0, device=world.device)
        push, wait = rows._push, torch.cuda.Stream.wait_stream

        def note_push(leaves: Tensor) -> None:
            streams.append(names[torch.cuda.current_stream().stream_id])
            push(leaves)

        def note_wait(stream: Any, other: Any) -> None:
            waits.append((names[stream.stream_id], names[other.stream_id]))
            wait(stream, other)

        rows.begin_step(7)
        with patch.object(rows, "_push", note_push), patch.object(torch.cuda.Stream, "wait_stream", note_wait):
            for calls, leaf in ((2, 1.0), (0, 0.0), (1, 2.0**24), (1, -3 * 2.0**24)):
                if calls:  # twice, of which one is reduced; in no other pass is a leaf left waiting
                    with torch.cuda.stream(side):
                        reduce_leaf(rows, world, leaf * (world.rank + 1), output, calls=calls)
                    waiting.append(rows._leaves_at_hand is not None)
                rows.end_pass()
            rows.finish_step()
        return streams, waits, waiting, output.tolist()

    both = [(1, 0), (0, 1)]
    expected = ([1] * 4, both * 2, [True, False, False], [3.0] * 3)  # (1 + 2 + 0 + 0) + (2²⁴ + 2²⁵ - 3·2²⁴ + nothing)
    assert gpus.each_rank(2, work) == [expected] * 2


def reduce_leaf(rows: RowSum, world: World, leaf: float, output: Tensor, *, calls: int = 1) -> None:
    for _ in range(calls):
        rows.note_forward()
    own = torch.full((6,), leaf, device=world.device)
    rows(output, own, dist.distributed_c10d._get_default_group(), None)


def test_a_sharded_sum_is_that_of_its_step_alone() -> None:
    def work(world: World) -> list[str]:
        rows, output, found = RowSum(2), torch.ones(3), list[str]()
        for leaves in (0, 4, 0):  # outside of a step nothing is summed; in it, a pass without the module adds zeros
            if leaves:
                rows.begin_step(leaves)
            reduce_leaf(rows, world, -0.0 if leaves else 1.0, output.fill_(9.0))
            for _ in range(leaves // 2):
                rows.end_pass()
            rows.finish_step()
            found.append(str(output.tolist()))
        rows.begin_step(4)
        reduce_leaf(rows, world, 1.0, output)
        reduce_leaf(rows, world, 1.0, output, calls=0)
        with pytest.raises(RuntimeError, match="more often than the module was called"):
            rows.end_pass()
        return found

    assert run_on_each_rank(2, work) == [["[0.0, 0.0, 0.0]"] * 3] * 2


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
