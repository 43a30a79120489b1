"""Where a command's work runs: on one device of this machine, or in a group of processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from multigpu_cli.config.schema import DeviceConfig
from multigpu_cli.runtime.choose_strategy_and_devices import (
    Placement,
    choose_placement,
    count_cores,
    count_visible_gpus,
)
from multigpu_cli.runtime.launch_env import LaunchEnv
from multigpu_cli.runtime.process_group import process_group
from multigpu_cli.runtime.world import World


def place_on_machine(device: DeviceConfig, launch_env: LaunchEnv | None = None) -> Placement:
    """Choose among the GPUs and CPU cores that this process may use."""
    return choose_placement(device, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=launch_env)


def place_on_one_device(device: DeviceConfig) -> Placement:
    """One process on the first device that the settings allow."""
    return place_on_machine(replace(device, multi_gpu="none", nproc_per_node=None))


@contextmanager
def join_workers(device: DeviceConfig, timeout: float) -> Iterator[tuple[Placement, World]]:
    """Join the process group of the workers that a launcher has started.

    Args:
        timeout: seconds after which a collective that lacks a rank fails.
    """
    launch_env = LaunchEnv.current()
    placement = place_on_machine(device, launch_env)
    with process_group(launch_env, placement.devices[0], timeout=timeout, backend=placement.backend) as world:
        yield placement, world
