"""What a run on GPUs says of them, also where NVML can't or a step did not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multigpu_cli.faults import watchdog
from tests.gpu.simulated.gpus import train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import Gpu, Machine


def lines(folder: Path) -> list[dict[str, Any]]:
    """The `train` lines of a run."""
    events = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "train"]


def test_a_gpu_that_nvml_has_lost_ends_no_run_and_is_told_of_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lost = Machine((Gpu(nvml={"lost": "GPU is lost"}),))
    flags: dict[str, Any] = {"max_steps": 4, "log_interval": 1, "save_dir": str(tmp_path / "run")}
    ended = train_on_gpus(1, machine=lost, screen="normal", **flags)
    assert (ended.error, ended.summary["status"]) == ("", "completed")
    assert capfd.readouterr().out.count("of the GPU of rank 0: not known (NVML: GPU is lost)") == 1
    assert all(line["gpu_utilisation"] == line["gpu_memory_used"] == [None] for line in lines(tmp_path / "run"))
    assert all(line["memory"][0] > 0 for line in lines(tmp_path / "run"))


class Hungry(nn.Module):
    """From its fifth pass in training on, more than ten samples take a mebibyte, and do not fit all the same."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(6, num_classes), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        if self.training and self.passes > 4 and len(inputs) > 10:
            _taken = inputs.new_zeros(2**18)
            raise torch.OutOfMemoryError("CUDA out of memory (played)")
        logits: Tensor = self.layer(inputs)
        return logits


HALVED = {"batch_size": 20, "global_batch_size": 20}


@pytest.mark.parametrize(("batch", "halvings"), [(HALVED, 1), ({"batch_size": "auto"}, 0)], ids=["halved", "auto"])
def test_what_did_not_fit_is_not_the_peak_of_what_goes_on(batch: dict[str, Any], halvings: int, tmp_path: Path) -> None:
    flags = batch | {"max_steps": 4, "log_interval": 1, "multi_gpu": "none", "data": "tests.support.user_code:tensors"}
    ended = train_on_gpus(1, save_dir=str(tmp_path), model="tests.gpu.simulated.test_monitoring:Hungry", **flags)
    assert (ended.error, [fault["kind"] for fault in ended.summary["faults"]]) == ("", ["out of memory"] * halvings)
    assert all(fault["step"] > 0 for fault in ended.summary["faults"])
    assert 0 < ended.summary["peak_memory_bytes"][0] < 2**20


class Seeds(nn.Module):
    """Writes down what the generators of all GPUs were seeded with when a pass in training began."""

    def __init__(self, num_classes: int, file: str) -> None:
        super().__init__()
        self.layer, self.file = nn.Linear(6, num_classes), file

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and inputs.device.index == 1:
            with open(self.file, "a") as file:
                print(*(generator.initial_seed() for generator in torch.cuda.default_generators), file=file)
        logits: Tensor = self.layer(inputs)
        return logits


def test_every_gpu_of_dp_follows_the_seed(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"max_steps": 3, "batch_size": 6, "data": "tests.support.user_code:tensors"}
    flags |= {"model": "tests.gpu.simulated.test_monitoring:Seeds", "save_dir": str(tmp_path / "run")}
    ended = train_on_gpus(1, multi_gpu="dp", **flags, sets=[f"model.args.file={tmp_path / 'seeds'}"])
    assert (ended.error, ended.summary["strategy"]) == ("", "dp")
    seeds = [tuple(map(int, line.split())) for line in (tmp_path / "seeds").read_text().splitlines()][-3:]
    assert len({number for pair in seeds for number in pair}) == 6, "each GPU in each step"


def test_all_gpus_of_dp_have_a_part_in_the_first_gradient_of_a_step(tmp_path: Path) -> None:
    """Samples that are all alike have no gradient noise, if both gradients are means over their own samples."""
    flags: dict[str, Any] = {"model": "tests.run.test_profile_micro_batch:plain", "multi_gpu": "dp", "lr": 1e-2}
    flags |= {"batch_size": 5, "global_batch_size": 20, "max_steps": 12, "log_interval": 2, "save_dir": str(tmp_path)}
    ended = train_on_gpus(1, data="tests.support.user_code:OneSample", **flags)
    assert (ended.error, lines(tmp_path)[-1]["noise_scale"]) == ("", pytest.approx(0, abs=1e-4))


def test_a_run_that_fails_over_nccl_aborts_its_group(tmp_path: Path) -> None:
    def note_end(sim: Simulated) -> None:
        def noted(real: Any, how: str) -> Any:
            def end(*given: Any) -> Any:
                with open(tmp_path / "ends", "a") as file:
                    print(how, file=file)
                return real(*given)

            return end

        watchdog.PATIENCE = 60.0  # type: ignore[attr-defined]  # its own end of a process, without an abort, is for one whose main thread waits
        dist.ProcessGroup.abort = noted(dist.ProcessGroup.abort, "aborted")  # type: ignore[method-assign]
        dist.destroy_process_group = noted(dist.destroy_process_group, "destroyed")

    flags: dict[str, Any] = {
        "model": "tests.support.oom_model:net",
        "data": "tests.support.user_code:tensors",
        "batch_size": 10,
        "epochs": 4,
    }
    sets = ["model.args.after=6", "model.args.limit=5", "model.args.rank=1"]
    ended = train_on_gpus(2, prepare=note_end, save_dir=str(tmp_path / "run"), **flags, sets=sets)
    assert "rank 1 ran out of memory at step" in ended.error
    assert (tmp_path / "ends").read_text().split() == ["aborted"] * 2


def test_exact_is_refused_on_unlike_gpus(tmp_path: Path) -> None:
    unlike = Machine((Gpu(), Gpu(name="Tesla T4", capability=(7, 5))))
    ended = train_on_gpus(2, machine=unlike, save_dir=str(tmp_path), exact=True, amp="off", max_steps=2)
    assert ended.kind == "RequestError"
    assert "rank 1 would train with device Tesla T4, rank 0 with NVIDIA H100 80GB HBM3" in ended.error
