"""doctor: whether this machine is fit to train on, by looking, and by measuring what can be measured."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from multigpu_cli.commands import doctor_gpus, doctor_nodes, doctor_system, doctor_wire
from multigpu_cli.commands.doctor_findings import Finding, lines
from multigpu_cli.commands.doctor_gpus import Facts
from multigpu_cli.commands.doctor_model import fitting
from multigpu_cli.commands.doctor_processes import known
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import FAILED
from multigpu_cli.launch import WorkersFailed
from multigpu_cli.monitor import gpu
from multigpu_cli.monitor.journal import valid_json
from multigpu_cli.runtime.devices import Choice, choose, cores, visible_gpus
from multigpu_cli.runtime.world import Rendezvous, grouped, joined, met

_HOME = "checkpoints"
_LONGEST_WAIT = 60.0  # seconds in a collective
_OF_THE_MACHINE = {"multi_gpu", "gpu_ids", "nproc_per_node", "save_dir"}


def examined(config: Config, environ: Mapping[str, str]) -> list[Finding]:
    """Everything that can be found out here.

    Args:
        config: its devices are measured; its model is tried where one of its settings was given.

    Raises:
        RequestError: the settings can't be carried out at all.
    """
    facts = gathered(environ)
    ddp = replace(config.device, multi_gpu="ddp")
    choice = choose(ddp, gpus=visible_gpus(), cpus=cores(), meeting=None)
    save_dir = Path(config.checkpoint.save_dir or _HOME)
    found = [
        *doctor_gpus.findings(facts),
        *doctor_system.findings(save_dir, cores(), max(choice.launch, facts.visible)),
    ]
    found += _devices(choice)
    found += _wire(choice)
    if config.explicit - _OF_THE_MACHINE:
        found += fitting(config)
    return found


def of_the_job(config: Config, environ: Mapping[str, str], meeting: Rendezvous) -> tuple[list[Finding], int]:
    """What can be found out under torchrun, of all its nodes; for rank 0 to show, and everybody's exit code."""
    choice = choose(config.device, gpus=visible_gpus(), cpus=cores(), meeting=meeting)
    if blocked := doctor_nodes.no_way_to_the_store(meeting):
        return [blocked], FAILED
    world, store = met(meeting, choice.devices[0], timeout=_LONGEST_WAIT)
    assert world.store is not None
    here: list[Finding] = []
    if world.local_rank == 0:
        seen, save_dir = gathered(environ), Path(config.checkpoint.save_dir or _HOME)
        here = [*doctor_gpus.findings(seen), *doctor_system.findings(save_dir, cores(), world.local_size)]
    found = [*here, *doctor_nodes.examined(world, config, environ, here)]
    if any(finding.verdict == "fail" for finding in found[len(here) :]):
        found.append(Finding("all-reduce", "not checked", "first what is above"))
    else:
        with grouped(world, store, timeout=_LONGEST_WAIT):
            found += doctor_wire.findings(doctor_wire.measure(world))
    code = FAILED if any(finding.verdict == "fail" for finding in found) else 0
    return found if world.main else [], doctor_nodes.farewell(world, code)


def gathered(environ: Mapping[str, str]) -> Facts:
    """Ask torch, NVML and the system."""
    facts = Facts(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=str(version) if (version := torch.backends.cudnn.version()) else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        architectures=torch.cuda.get_arch_list(),
        visible=visible_gpus(),
        hidden=environ.get("CUDA_VISIBLE_DEVICES"),
        peers=_peers(visible_gpus()),
    )
    try:
        nvml = gpu.opened()
    except gpu.NoNvml as reason:
        return replace(facts, no_nvml=str(reason), tenants=known([]))
    return with_nvml(facts, nvml)


def with_nvml(facts: Facts, nvml: Any) -> Facts:
    """The facts, and what NVML adds to them."""
    version, newest = gpu.driver(nvml)
    found = gpu.gpus(nvml)
    tenants = known(tenant.pid for each in found for tenant in each.tenants)
    wires = gpu.links(nvml)
    return replace(facts, driver=version, driver_cuda=newest, gpus=found, links=wires, tenants=tenants)


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print them, and how many are bad."""
    if as_json:
        print(valid_json({"findings": [finding.as_dict() for finding in findings]}, indent=2))
        return
    print("\n".join(lines(findings)))


def work(config: Config, folder: Path, environ: Mapping[str, str]) -> None:
    """Take part in the measurements, as one of the workers."""
    meeting = Rendezvous.from_environment(environ)
    choice = choose(config.device, gpus=visible_gpus(), cpus=cores(), meeting=meeting)
    with joined(meeting, choice.devices[0], timeout=_LONGEST_WAIT) as world:
        doctor_wire.write(world, folder)


def _peers(count: int) -> list[list[bool]] | None:
    if count < 2:
        return None
    every = range(count)
    return [[one == other or torch.cuda.can_device_access_peer(one, other) for other in every] for one in every]


def _devices(choice: Choice) -> Iterator[Finding]:
    if choice.devices[0].type != "cuda":
        yield Finding("host to GPU", "not checked", "no GPU")
    else:
        yield from map(doctor_wire.to_device, choice.devices)


def _wire(choice: Choice) -> Iterator[Finding]:
    """Real workers: one for each GPU; with fewer than two of them, processes on the CPU."""
    if choice.devices[0].type == "cuda" and choice.launch < 2:
        yield Finding("all-reduce (nccl)", "not checked", "one GPU has nobody to talk to; on the CPU instead:")
    if choice.devices[0].type != "cuda" or choice.launch < 2:
        count = max(2, choice.launch)
        choice = Choice("ddp", (torch.device("cpu"),) * count, count, "doctor")
    try:
        found = doctor_wire.launched(choice)
    except WorkersFailed as failed:
        said = f"{choice.launch} workers could not add up tensors: {failed.problem or 'see above'}"
        yield Finding("all-reduce", "fail", said, "NCCL_DEBUG=INFO before the same command shows where it ended")
        return
    yield from doctor_wire.findings(found)
