from typing import Any

import pytest
import torch

from multigpu_cli.config.schema import DeviceConfig
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.placement import (
    Placement,
    choose_placement,
    count_cores,
    count_visible_gpus,
    describe_unlike_gpus,
    gpu_models,
)
from multigpu_cli.distributed.world import RankGpu, World
from multigpu_cli.errors import RequestError


def choose(mode: str = "auto", *, gpus: int = 0, cpus: int = 4, processes: int = 0, **asked: object) -> Placement:
    launch_env = None
    if processes:
        launch_env = LaunchEnv(
            rank=1,
            size=processes,
            local_rank=processes - 1,
            local_size=processes,
            address="localhost",
            port=1,
            attempt=0,
            agent_store=True,
        )
    return choose_placement(DeviceConfig(multi_gpu=mode, **asked), gpus=gpus, cpus=cpus, launch_env=launch_env)  # type: ignore[arg-type]


def names(choice: Placement) -> list[str]:
    return [str(device) for device in choice.devices]


@pytest.mark.parametrize(
    ("mode", "gpus", "strategy", "devices", "launch", "reason"),
    [
        ("auto", 0, "single", ["cpu"], 0, "no GPU found"),
        ("auto", 1, "single", ["cuda:0"], 0, "one GPU"),
        ("auto", 3, "ddp", ["cuda:0", "cuda:1", "cuda:2"], 3, "self-launched on GPUs 0,1,2"),
        ("none", 3, "single", ["cuda:0"], 0, "--multi-gpu none"),
        ("none", 0, "single", ["cpu"], 0, "--multi-gpu none"),
        ("ddp", 2, "ddp", ["cuda:0", "cuda:1"], 2, "self-launched"),
        ("ddp", 1, "ddp", ["cuda:0"], 1, "self-launched on GPUs 0"),
        ("ddp", 0, "ddp", ["cpu", "cpu"], 2, "self-launched on 2 CPU processes, no GPU found"),
        ("fsdp", 0, "fsdp", ["cpu", "cpu"], 2, "self-launched on 2 CPU processes, no GPU found"),
        ("fsdp", 2, "fsdp", ["cuda:0", "cuda:1"], 2, "self-launched"),
        ("dp", 2, "dp", ["cuda:0", "cuda:1"], 0, "--multi-gpu dp on GPUs 0,1"),
        ("dp", 1, "single", ["cuda:0"], 0, "needs two GPUs and there is one"),
        ("dp", 0, "single", ["cpu"], 0, "needs two GPUs and there are none"),
    ],
)
def test_what_is_chosen_in_one_process(
    mode: str, gpus: int, strategy: str, devices: list[str], launch: int, reason: str
) -> None:
    choice = choose(mode, gpus=gpus)
    assert (choice.strategy, names(choice), choice.num_processes_to_launch) == (strategy, devices, launch)
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("mode", "asked", "strategy", "devices", "launch"),
    [
        ("dp", {"gpu_ids": (2, 0)}, "dp", ["cuda:2", "cuda:0"], 0),
        ("auto", {"gpu_ids": (1, 3)}, "ddp", ["cuda:1", "cuda:3"], 2),
        ("auto", {"gpu_ids": (3,)}, "single", ["cuda:3"], 0),
        ("none", {"gpu_ids": (2,)}, "single", ["cuda:2"], 0),
        ("ddp", {"nproc_per_node": 3}, "ddp", ["cuda:0", "cuda:1", "cuda:2"], 3),
        ("auto", {"nproc_per_node": 1}, "ddp", ["cuda:0"], 1),
    ],
)
def test_gpu_ids_and_process_counts_are_followed(
    mode: str, asked: dict[str, Any], strategy: str, devices: list[str], launch: int
) -> None:
    choice = choose(mode, gpus=4, **asked)
    assert (choice.strategy, names(choice), choice.num_processes_to_launch) == (strategy, devices, launch)


def test_without_gpus_ddp_takes_as_many_cpu_processes_as_asked() -> None:
    assert choose("ddp", cpus=1).num_processes_to_launch == 1
    assert choose("ddp", nproc_per_node=5).devices == (torch.device("cpu"),) * 5
    assert choose("auto", nproc_per_node=3).num_processes_to_launch == 3


@pytest.mark.parametrize(
    ("gpus", "named"), [(0, "no GPU is visible"), (1, "visible: 0"), (2, "there is no GPU 2,5 (visible: 0,1)")]
)
@pytest.mark.parametrize("mode", ["auto", "dp", "ddp", "none"])
def test_gpus_that_are_not_there_are_a_wrong_request(mode: str, gpus: int, named: str) -> None:
    with pytest.raises(RequestError) as refused:
        choose(mode, gpus=gpus, gpu_ids=(2, 5))
    assert "--gpu-ids 2,5" in refused.value.problem
    assert named in refused.value.problem
    assert "leave --gpu-ids out" in refused.value.remedy


def test_more_processes_than_gpus_are_a_wrong_request() -> None:
    with pytest.raises(RequestError, match=r"--nproc-per-node 3, but only 2 GPUs to use"):
        choose("ddp", gpus=2, nproc_per_node=3)


@pytest.mark.parametrize(("mode", "strategy"), [("auto", "ddp"), ("ddp", "ddp"), ("fsdp", "fsdp")])
def test_under_torchrun_it_is_ddp_on_the_own_gpu_unless_asked_otherwise(mode: str, strategy: str) -> None:
    choice = choose(mode, gpus=4, processes=4)
    assert (choice.strategy, names(choice), choice.num_processes_to_launch) == (strategy, ["cuda:3"], 0)
    assert choice.reason == "torchrun started 4 processes"


def test_a_launcher_may_show_each_process_one_gpu_of_its_own() -> None:
    """SLURM's --gpus-per-task=1, say: whatever the local rank, the GPU has number 0 there."""
    assert names(choose(gpus=1, processes=4)) == ["cuda:0"]


def test_under_torchrun_without_gpus_it_is_ddp_on_cpu() -> None:
    choice = choose(processes=1)
    assert (choice.strategy, names(choice)) == ("ddp", ["cpu"])
    assert choose("fsdp", processes=1).strategy == "fsdp"
    assert choice.reason == "torchrun started 1 process; no GPU found, so on CPU"


@pytest.mark.parametrize(
    ("mode", "gpus", "named"),
    [("none", 4, "--multi-gpu none, but torchrun started 4"), ("auto", 2, "4 processes on a machine with 2 visible")],
)
def test_what_does_not_go_with_torchrun_is_refused(mode: str, gpus: int, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        choose(mode, gpus=gpus, processes=4)


def test_a_local_rank_beyond_the_visible_gpus_is_refused() -> None:
    """By a launcher that does not say how many processes it has started here."""
    launch_env = LaunchEnv(3, 8, 3, 1, "localhost", 1, attempt=0, agent_store=False)
    with pytest.raises(RequestError, match=r"LOCAL_RANK=3.*2 visible GPUs"):
        choose_placement(DeviceConfig(), gpus=2, cpus=2, launch_env=launch_env)


def test_gpus_are_counted_by_rank_and_in_one_process_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"model {device.index}")
    first, third = torch.device("cuda", 0), torch.device("cuda", 2)
    alone = gpu_models(Placement("dp", (third, first), 0, ""), World(third))
    assert alone == {2: "model 2", 0: "model 0"}
    gpus = (RankGpu("a", "H100"), RankGpu("b", "L4"))
    assert gpu_models(Placement("ddp", (first,), 0, ""), World(first, 0, 2, gpus=gpus)) == {0: "H100", 1: "L4"}
    cpu = torch.device("cpu")
    assert gpu_models(Placement("ddp", (cpu,), 0, ""), World(cpu, 0, 2, gpus=(None, None))) == {}


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ((), ""),
        (("H100", "H100"), ""),
        (("H100",), ""),
        (("H100", "L4", "H100"), "H100 (rank 0, 2) and L4 (rank 1)"),
        (("L4", *["H100"] * 11), "L4 (rank 0) and H100 (rank 1, 2, 3, 4, 5, 6, 7, 8, …)"),
    ],
)
def test_gpus_of_unlike_models_are_named(models: tuple[str, ...], said: str) -> None:
    found = describe_unlike_gpus(dict(enumerate(models)), "rank")
    assert said in found
    assert bool(found) == bool(said)
    assert not said or "slowest" in found


def test_ids_that_a_self_launch_has_followed_are_not_looked_up_again_in_its_workers() -> None:
    """A worker sees only the chosen GPUs, numbered afresh: GPUs 2,3 of four are 0 and 1 there."""
    choice = choose("ddp", gpus=2, processes=2, gpu_ids=(2, 3), nproc_per_node=2)
    assert names(choice) == ["cuda:1"]


def test_this_machine_is_counted() -> None:
    assert count_cores() >= 1
    assert count_visible_gpus() == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_processes_of_our_own_launch_are_called_so() -> None:
    ours = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for run_id, because in (("multigpu-1", "self-launched 2 processes"), ("none", "torchrun started 2 processes")):
        launch_env = LaunchEnv.from_environment(ours | {"TORCHELASTIC_RUN_ID": run_id})
        assert choose_placement(DeviceConfig(), gpus=2, cpus=2, launch_env=launch_env).reason == because


@pytest.mark.parametrize("flags", [{}, {"mode": "ddp"}, {"processes": 1}])
def test_an_apple_gpu_is_named_rather_than_not_found(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    choice = choose(**flags)
    assert "Apple GPUs are not supported" in choice.reason
    assert "no GPU found" not in choice.reason
