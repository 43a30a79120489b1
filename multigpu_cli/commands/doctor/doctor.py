"""doctor: checks whether this machine, or all nodes of a torchrun job, can train; measures what can be measured."""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from multigpu_cli.commands.doctor import allreduce, gpus, nodes, system
from multigpu_cli.commands.doctor.findings import Finding, choose_exit_code
from multigpu_cli.commands.doctor.gpus import MachineFacts
from multigpu_cli.commands.doctor.model import check_model
from multigpu_cli.commands.doctor.processes import find_gpu_processes
from multigpu_cli.commands.workers import place_on_machine
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import FAILED
from multigpu_cli.faults.stop import interruptible
from multigpu_cli.launch import WorkersFailed
from multigpu_cli.monitor import gpu
from multigpu_cli.runtime.choose_strategy_and_devices import Placement, count_cores, count_visible_gpus
from multigpu_cli.runtime.launch_env import LaunchEnv
from multigpu_cli.runtime.process_group import init_process_group, rendezvous

_HOME = "checkpoints"
_OF_THE_MACHINE = {"multi_gpu", "gpu_ids", "nproc_per_node", "save_dir"}


def run_doctor(config: Config, environ: Mapping[str, str]) -> tuple[list[Finding], int]:
    """All checks: of this machine, or under torchrun of all its nodes; the findings to show, and the exit code.

    Raises:
        RequestError: the settings can't be carried out at all.
    """
    if launch_env := LaunchEnv.from_environment(environ):
        return _check_job(config, environ, launch_env)
    with interruptible():
        findings = run_checks(config, environ)
    return findings, choose_exit_code(findings)


def run_checks(config: Config, environ: Mapping[str, str]) -> list[Finding]:
    """All checks of this machine.

    Args:
        config: its devices are measured; its model is tried where one of its settings was given.

    Raises:
        RequestError: the settings can't be carried out at all.
    """
    placement = place_on_machine(replace(config.device, multi_gpu="ddp"))
    findings = list(_check_machine(config, environ, max(placement.num_processes_to_launch, count_visible_gpus())))
    findings += _check_devices(placement)
    findings += _check_allreduce(placement)
    if config.explicit - _OF_THE_MACHINE:
        findings += check_model(config)
    return findings


def _check_job(config: Config, environ: Mapping[str, str], launch_env: LaunchEnv) -> tuple[list[Finding], int]:
    """All checks of a job's nodes: the findings, on rank 0 alone, and the exit code of all ranks."""
    placement = place_on_machine(config.device, launch_env)
    if blocked := nodes.check_store_connection(launch_env):
        return [blocked], FAILED
    world, store = rendezvous(launch_env, placement.devices[0], timeout=allreduce.LONGEST_WAIT)
    here = list(_check_machine(config, environ, world.local_size)) if world.local_rank == 0 else []
    between = nodes.check_nodes(world, config, environ, here)
    if choose_exit_code(between) == FAILED:
        between.append(Finding("all-reduce", "not checked", "the failures above come first"))
    else:
        with init_process_group(world, store, timeout=allreduce.LONGEST_WAIT):
            between += allreduce.judge_allreduce(allreduce.measure_allreduce(world))
    findings = [*here, *between]
    return findings if world.is_main else [], nodes.agree_on_exit_code(world, choose_exit_code(findings))


def _check_machine(config: Config, environ: Mapping[str, str], workers: int) -> Iterator[Finding]:
    yield from gpus.check_gpus(gather_facts(environ))
    yield from system.check_system(Path(config.checkpoint.save_dir or _HOME), count_cores(), workers)


def gather_facts(environ: Mapping[str, str]) -> MachineFacts:
    """The versions and GPUs that torch, NVML and the system report."""
    facts = MachineFacts(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=str(version) if (version := torch.backends.cudnn.version()) else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        architectures=torch.cuda.get_arch_list(),
        visible=count_visible_gpus(),
        hidden=environ.get("CUDA_VISIBLE_DEVICES"),
        peers=_list_peer_access(count_visible_gpus()),
    )
    try:
        nvml = gpu.open_nvml()
    except gpu.NoNvml as reason:
        return replace(facts, no_nvml=str(reason), tenants=find_gpu_processes([]))
    return add_nvml_facts(facts, nvml)


def add_nvml_facts(facts: MachineFacts, nvml: Any) -> MachineFacts:
    """The facts, and what NVML adds to them."""
    version, newest = gpu.read_driver(nvml)
    on_machine, links = gpu.list_gpus(nvml), gpu.read_links(nvml)
    tenants = find_gpu_processes(tenant.pid for each in on_machine for tenant in each.processes)
    return replace(facts, driver=version, driver_cuda=newest, gpus=on_machine, links=links, tenants=tenants)


def _list_peer_access(count: int) -> list[list[bool]] | None:
    if count < 2:
        return None
    devices = range(count)
    return [[one == other or torch.cuda.can_device_access_peer(one, other) for other in devices] for one in devices]


def _check_devices(placement: Placement) -> Iterator[Finding]:
    if placement.devices[0].type != "cuda":
        yield Finding("host to GPU", "not checked", "no GPU")
    else:
        yield from map(allreduce.check_host_to_device, placement.devices)


def _check_allreduce(placement: Placement) -> Iterator[Finding]:
    """Real workers: one for each GPU; with fewer than two of them, processes on the CPU."""
    on_gpu, count = placement.devices[0].type == "cuda", max(2, placement.num_processes_to_launch)
    if on_gpu and placement.num_processes_to_launch < 2:
        yield Finding("all-reduce (nccl)", "not checked", "it takes two GPUs; on the CPU instead:")
    if not on_gpu or placement.num_processes_to_launch < 2:
        placement = Placement("ddp", (torch.device("cpu"),) * count, count, "doctor")
    try:
        measured = allreduce.measure_in_workers(placement)
    except WorkersFailed as failed:
        evidence = f"{placement.num_processes_to_launch} workers could not all-reduce: {failed.problem}"
        yield Finding("all-reduce", "fail", evidence, "NCCL_DEBUG=INFO before the same command shows where it ended")
        return
    yield from allreduce.judge_allreduce(measured)
