"""doctor: whether this machine is fit to train on, by looking, and by measuring what can be measured."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from multigpu_cli.commands.doctor import allreduce, gpus, nodes, system
from multigpu_cli.commands.doctor.findings import Finding, format_findings
from multigpu_cli.commands.doctor.gpus import MachineFacts
from multigpu_cli.commands.doctor.model import check_model
from multigpu_cli.commands.doctor.processes import find_gpu_processes
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import FAILED
from multigpu_cli.launch import WorkersFailed
from multigpu_cli.monitor import gpu
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.runtime.device_placement import Placement, choose_placement, count_cores, count_visible_gpus
from multigpu_cli.runtime.launch_env import LaunchEnv
from multigpu_cli.runtime.process_group import init_process_group, rendezvous

_HOME = "checkpoints"
_OF_THE_MACHINE = {"multi_gpu", "gpu_ids", "nproc_per_node", "save_dir"}


def run_checks(config: Config, environ: Mapping[str, str]) -> list[Finding]:
    """Everything that can be found out here.

    Args:
        config: its devices are measured; its model is tried where one of its settings was given.

    Raises:
        RequestError: the settings can't be carried out at all.
    """
    facts = gather_facts(environ)
    ddp = replace(config.device, multi_gpu="ddp")
    placement = choose_placement(ddp, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=None)
    save_dir = Path(config.checkpoint.save_dir or _HOME)
    findings = [
        *gpus.check_gpus(facts),
        *system.check_system(save_dir, count_cores(), max(placement.num_processes_to_launch, facts.visible)),
    ]
    findings += _check_devices(placement)
    findings += _check_allreduce(placement)
    if config.explicit - _OF_THE_MACHINE:
        findings += check_model(config)
    return findings


def run_job_checks(config: Config, environ: Mapping[str, str], launch_env: LaunchEnv) -> tuple[list[Finding], int]:
    """What can be found out under torchrun, of all its nodes; for rank 0 to show, and everybody's exit code."""
    placement = choose_placement(config.device, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=launch_env)
    if blocked := nodes.check_store_connection(launch_env):
        return [blocked], FAILED
    world, store = rendezvous(launch_env, placement.devices[0], timeout=allreduce.LONGEST_WAIT)
    assert world.store is not None
    here: list[Finding] = []
    if world.local_rank == 0:
        seen, save_dir = gather_facts(environ), Path(config.checkpoint.save_dir or _HOME)
        here = [*gpus.check_gpus(seen), *system.check_system(save_dir, count_cores(), world.local_size)]
    findings = [*here, *nodes.check_nodes(world, config, environ, here)]
    if any(finding.verdict == "fail" for finding in findings[len(here) :]):
        findings.append(Finding("all-reduce", "not checked", "first what is above"))
    else:
        with init_process_group(world, store, timeout=allreduce.LONGEST_WAIT):
            findings += allreduce.judge_allreduce(allreduce.measure_allreduce(world))
    code = FAILED if any(finding.verdict == "fail" for finding in findings) else 0
    return findings if world.is_main else [], nodes.agree_on_exit_code(world, code)


def gather_facts(environ: Mapping[str, str]) -> MachineFacts:
    """Ask torch, NVML and the system."""
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
    on_machine = gpu.list_gpus(nvml)
    tenants = find_gpu_processes(tenant.pid for each in on_machine for tenant in each.processes)
    wires = gpu.read_links(nvml)
    return replace(facts, driver=version, driver_cuda=newest, gpus=on_machine, links=wires, tenants=tenants)


def print_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print them, and how many are bad."""
    if as_json:
        print(dump_json({"findings": [finding.as_dict() for finding in findings]}, indent=2))
        return
    print("\n".join(format_findings(findings)))


def _list_peer_access(count: int) -> list[list[bool]] | None:
    if count < 2:
        return None
    every = range(count)
    return [[one == other or torch.cuda.can_device_access_peer(one, other) for other in every] for one in every]


def _check_devices(placement: Placement) -> Iterator[Finding]:
    if placement.devices[0].type != "cuda":
        yield Finding("host to GPU", "not checked", "no GPU")
    else:
        yield from map(allreduce.check_host_to_device, placement.devices)


def _check_allreduce(placement: Placement) -> Iterator[Finding]:
    """Real workers: one for each GPU; with fewer than two of them, processes on the CPU."""
    if placement.devices[0].type == "cuda" and placement.num_processes_to_launch < 2:
        yield Finding("all-reduce (nccl)", "not checked", "one GPU has nobody to talk to; on the CPU instead:")
    if placement.devices[0].type != "cuda" or placement.num_processes_to_launch < 2:
        count = max(2, placement.num_processes_to_launch)
        placement = Placement("ddp", (torch.device("cpu"),) * count, count, "doctor")
    try:
        measured = allreduce.measure_in_workers(placement)
    except WorkersFailed as failed:
        evidence = f"{placement.num_processes_to_launch} workers could not add up tensors: {failed.problem}"
        yield Finding("all-reduce", "fail", evidence, "NCCL_DEBUG=INFO before the same command shows where it ended")
        return
    yield from allreduce.judge_allreduce(measured)
