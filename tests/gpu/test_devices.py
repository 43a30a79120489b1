"""Which GPU a process works on, and that it touches no other one: on simulated GPUs."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed import process_group
from multigpu_cli.monitor import journal
from tests.gpu.simulated.gpus import TWO, alone, train_on_gpus
from tests.gpu.simulated.install import Simulated, install
from tests.gpu.simulated.machine import Gpu, Machine
from tests.support.run_training import OWN, run_training
from train_multi_gpu import train

FOUR = Machine.of(4)


def start(run: Path) -> journal.Event:
    return next(event for event in journal.read_events(run / "journal.jsonl") if event["event"] == "start")


@pytest.mark.parametrize(
    "flags", [{}, {"data_on_device": "off", "ema": "0.9"}, {"exact": "true", "amp": "off", "guard": "off"}]
)
def test_a_run_on_gpu_1_leaves_gpu_0_alone(flags: dict[str, str], tmp_path: Path) -> None:
    """Also a byte there, or a stream, is a context of its own, which takes half a gigabyte on a real one."""
    request = OWN | {"gpu_ids": "1", "max_steps": 6, "checkpoint_every": 2, "save_dir": str(tmp_path / "run")} | flags

    def work(sim: Simulated) -> tuple[str, list[int], dict[int, str]]:
        with sim.record.watching() as events:
            summary = train(resolve(request, [], None), screen="quiet")
        peaks = [sim.device.memory(number)["peak"] for number in range(2)]
        return summary["status"], peaks, {event.device: event.place for event in events}

    status, (first, second), asked = alone(work)
    assert (status, first) == ("completed", 0)
    assert second > 0
    assert asked.keys() == {1}, asked
    assert start(tmp_path / "run")["devices"] == ["cuda:1"]


def show_gpus(gpus: Callable[[int], str]) -> Callable[[], object]:
    """What makes a rank see only some of four GPUs, as its launcher would."""

    def prepare() -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus(int(os.environ["RANK"]))
        install(FOUR)

    return prepare


def test_each_rank_may_see_one_gpu_of_its_own(tmp_path: Path) -> None:
    """A whole run with gradients from both; alone(…) has compiled the library before the forks."""
    alone(lambda sim: None)
    run: dict[str, Any] = {"max_steps": 6, "exact": True, "amp": "off", "batch_size": 10, "global_batch_size": 20}
    ended = run_training(2, prepare=show_gpus(lambda rank: str(3 - rank)), save_dir=str(tmp_path / "two"), **run)
    assert not ended.error, ended.error
    assert (ended.summary["strategy"], ended.summary["world_size"]) == ("ddp", 2)
    lone = train_on_gpus(1, machine=TWO, multi_gpu="none", save_dir=str(tmp_path / "one"), **run)
    assert ended.summary["fingerprint"] == lone.summary["fingerprint"] is not None


def test_ranks_that_see_the_same_gpu_are_refused(tmp_path: Path) -> None:
    alone(lambda sim: None)
    ended = run_training(2, prepare=show_gpus(lambda rank: "2"), max_steps=6, save_dir=str(tmp_path / "run"))
    assert ended.kind == "RequestError"
    assert "ranks 0,1 share a GPU" in ended.error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("strategy", "whose"), [("ddp", "rank"), ("dp", "GPU")])
def test_gpus_of_unlike_models_are_named_and_share_one_format(
    strategy: str, whose: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machine, ranks = Machine((Gpu(), Gpu("Tesla T4", capability=(7, 5)))), 2 if strategy == "ddp" else 1
    ended = train_on_gpus(ranks, machine=machine, multi_gpu=strategy, max_steps=4, save_dir=str(tmp_path / "run"))
    assert not ended.error, ended.error
    said = " ".join("".join(capfd.readouterr()).split())
    assert f"warning: GPUs of several models: {Gpu().name} ({whose} 0) and Tesla T4 ({whose} 1)" in said
    assert (ended.summary["strategy"], ended.summary["precision"]) == (strategy, "fp16")
    assert start(tmp_path / "run")["gpus"] == [Gpu().name, "Tesla T4"]


def test_gpus_that_cannot_reach_each_other_are_told_after_the_first_words(tmp_path: Path) -> None:
    """On PCIe with IOMMU, say, NCCL connects, and its first kernel waits for ever."""

    def hang(sim: Simulated) -> None:
        def wait(*given: Any, **named: Any) -> None:
            if threading.current_thread().name == "group":
                time.sleep(30)
            real(*given, **named)

        real, process_group._FIRST = dist.all_reduce, 0.5
        patch.object(dist, "all_reduce", wait).start()

    ended = train_on_gpus(2, prepare=hang, max_steps=2, save_dir=str(tmp_path / "run"))
    assert ended.kind == "TrainingError"
    for way_out in ("NCCL_P2P_DISABLE=1", "/dev/shm", "NCCL_SOCKET_IFNAME"):
        assert way_out in ended.error
    assert not (tmp_path / "run").exists()
