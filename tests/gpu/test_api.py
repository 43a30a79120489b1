"""The Python API on simulated GPUs: what it says of them, and the devices that a caller names."""

import re

import pytest
import torch

from multigpu_cli.api import monitoring
from multigpu_cli.api.settings import MultiGPUConfig
from multigpu_cli.api.trainers import FaultToleranceManager
from multigpu_cli.api.training import resolve_placement
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.errors import RequestError
from tests.gpu.simulated.gpus import alone
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import GIB, Gpu, Machine

UNLIKE = Machine((Gpu("NVIDIA H100 80GB HBM3", 80 * GIB), Gpu("NVIDIA A100-SXM4-40GB", 40 * GIB)))


def test_unlike_gpus_are_listed_with_what_each_has(capfd: pytest.CaptureFixture[str]) -> None:
    def work(sim: Simulated) -> dict[str, object]:
        monitoring.print_gpu_info()
        return monitoring.get_gpu_info()

    found = alone(work, UNLIKE)
    assert (found["cuda_available"], found["gpu_count"], found["total_memory_gb"]) == (True, 2, 120.0)
    assert [each["name"] for each in found["gpu_details"]] == [gpu.name for gpu in UNLIKE.gpus]
    assert [each["memory_gb"] for each in found["gpu_details"]] == [80.0, 40.0]
    said = capfd.readouterr().out
    for number, (gpu, memory) in enumerate(zip(UNLIKE.gpus, ("80.0", "40.0"), strict=True)):
        assert f"GPU {number}: {gpu.name}, {memory} GiB, compute capability " in said


def test_a_rank_takes_the_device_that_the_caller_names_for_it() -> None:
    """And is told, under the launcher, which number is wrong."""

    def work(sim: Simulated) -> tuple[list[torch.device], list[str]]:
        def chosen(rank: int, ids: list[int]) -> torch.device:
            config = MultiGPUConfig(device_ids=ids)
            launch_env = LaunchEnv(rank, 2, rank, 2, "localhost", 1, attempt=0, agent_store=False)
            (device,) = resolve_placement(config, resolve({"multi_gpu": "ddp"}, [], None), launch_env).devices
            return device

        refused = []
        for ids in ([0, 7], [1]):
            with pytest.raises(RequestError) as error:
                chosen(1, ids)
            refused.append(str(error.value))
        return [chosen(rank, [1, 0]) for rank in range(2)], refused

    devices, refused = alone(work)
    assert devices == [torch.device("cuda", 1), torch.device("cuda", 0)]
    assert re.search(r"device_ids 0,7: there is no GPU 7 \(visible: 0,1\)", refused[0])
    assert re.search(r"device_ids \[1\]: 2 processes here need as many GPUs", refused[1])


def test_memory_that_ran_out_is_given_back_and_the_error_says_what_to_do() -> None:
    def work(sim: Simulated) -> tuple[list[str], str, int]:
        torch.zeros(1024, device="cuda")  # and given back: torch keeps its memory for later
        sim.device.fail_allocation(0, 0, 1024)
        manager = FaultToleranceManager()
        try:
            try:
                torch.zeros(1024, device="cuda")
            except torch.OutOfMemoryError as error:
                assert torch.cuda.memory_reserved() == 4096
                manager.handle_error(error)
        except torch.OutOfMemoryError as error:
            return error.__notes__, manager.errors[0]["remedy"], torch.cuda.memory_reserved()
        pytest.fail("the error was not raised again")

    notes, remedy, reserved = alone(work)
    assert notes == [f"try: {remedy}"]
    assert "--batch-size" in remedy
    assert reserved == 0
