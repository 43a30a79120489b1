"""doctor: checks whether this machine, or all nodes of a torchrun job, can train; measures what can be measured.

Whether a model fits, and with which batch size, is tried by running it on one device. A pretrained model whose weights
or data are not there yet is not run: what it takes is computed from its config.json.
"""

import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from multigpu_cli.commands.doctor import bandwidth, gpus, network, system
from multigpu_cli.commands.doctor.gpus import MachineFacts, find_gpu_processes
from multigpu_cli.commands.doctor.system import Finding, choose_exit_code
from multigpu_cli.commands.plan.from_config import FILLED, ConfigEstimate, estimate_training
from multigpu_cli.commands.plan.measure import build_probed, place_on_one_device
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.data.load import uses_environments
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.placement import Placement, count_cores, count_visible_gpus
from multigpu_cli.distributed.process_group import init_process_group, place_on_machine, rendezvous
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import FAILED, RequestError, TrainingError
from multigpu_cli.faults.stop import interruptible
from multigpu_cli.launch import WorkersFailed
from multigpu_cli.monitor import gpu
from multigpu_cli.monitor.format import format_bytes
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.batch_size import measure_peak_memory
from multigpu_cli.runtime.arithmetic import compute_checksums
from multigpu_cli.runtime.factories import describe_error, explain_torchvision
from multigpu_cli.runtime.precision import DTYPES

_HOME = "checkpoints"
_OF_THE_MACHINE = {"multi_gpu", "gpu_ids", "nproc_per_node", "save_dir"}


def run_doctor(config: Config, environ: Mapping[str, str]) -> tuple[list[Finding], int]:
    """All checks: of this machine, or under torchrun of all its nodes; the findings to show, and the exit code."""
    if launch_env := LaunchEnv.from_environment(environ):
        return _check_job(config, environ, launch_env)
    with interruptible():
        findings = run_checks(config, environ)
    return findings, choose_exit_code(findings)


def run_checks(config: Config, environ: Mapping[str, str]) -> list[Finding]:
    """All checks of this machine, whose model is tried where one of its settings was given."""
    placement = place_on_machine(replace(config.device, multi_gpu="ddp"))
    findings = list(check_machine(config, environ, max(placement.num_processes_to_launch, count_visible_gpus())))
    if placement.devices[0].type == "cuda":
        findings += map(bandwidth.check_host_to_device, placement.devices)
    else:
        findings.append(Finding("host to GPU", "not checked", "no GPU"))
    findings += map(check_arithmetic, dict.fromkeys(placement.devices))
    findings += _check_allreduce(placement)
    if config.explicit - _OF_THE_MACHINE:
        findings += check_model(config)
    return findings


def _check_job(config: Config, environ: Mapping[str, str], launch_env: LaunchEnv) -> tuple[list[Finding], int]:
    """All checks of a job's nodes: the findings, on rank 0 alone, and the exit code of all ranks."""
    placement = place_on_machine(config.device, launch_env)
    if blocked := network.check_store_connection(launch_env):
        return [blocked], FAILED
    world, store = rendezvous(launch_env, placement.devices[0], timeout=bandwidth.LONGEST_WAIT)
    here = list(check_machine(config, environ, world.local_size)) if world.local_rank == 0 else []
    between = network.check_nodes(world, config, environ, here)
    if choose_exit_code(between) == FAILED:
        between.append(Finding("all-reduce", "not checked", "the failures above come first"))
    else:
        with init_process_group(world, store, timeout=bandwidth.LONGEST_WAIT):
            between += bandwidth.judge_allreduce(bandwidth.measure_allreduce(world))
    findings = [*here, *between]
    return findings if world.is_main else [], network.agree_on_exit_code(world, choose_exit_code(findings))


def check_machine(config: Config, environ: Mapping[str, str], workers: int) -> Iterator[Finding]:
    """Check versions, GPUs and the system of this machine, which `workers` processes share; nothing is trained."""
    yield from gpus.check_gpus(gather_facts(environ))
    if fault := explain_torchvision("models of timm, torchvision and transformers"):
        yield Finding("torchvision", "warn", fault.problem, fault.remedy or "")
    yield from system.check_system(Path(config.checkpoint.save_dir or _HOME), count_cores(), workers)


def check_arithmetic(device: torch.device) -> Finding:
    """Show the checksums by which a run with --exact recognizes this device; the numbers have them by precision."""
    try:
        checksums = {precision: compute_checksums(device, precision) for precision in ("off", *DTYPES)}
    except RuntimeError as error:  # no memory, or no kernel: nothing trains on it
        return Finding(f"arithmetic of {device}", "fail", describe_error(error), "nvidia-smi shows who uses its memory")
    return Finding(f"arithmetic of {device}", "ok", "its checksums, for --exact: doctor --json", numbers=checksums)


def gather_facts(environ: Mapping[str, str]) -> MachineFacts:
    """The versions and GPUs that torch, NVML and the system report."""
    ids = range(count_visible_gpus())
    peers = [[one == other or torch.cuda.can_device_access_peer(one, other) for other in ids] for one in ids]
    facts = MachineFacts(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=str(version) if (version := torch.backends.cudnn.version()) else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        architectures=torch.cuda.get_arch_list(),
        visible=len(ids),
        hidden=environ.get("CUDA_VISIBLE_DEVICES"),
        peers=peers if len(ids) > 1 else None,
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


def _check_allreduce(placement: Placement) -> Iterator[Finding]:
    """Real workers: one for each GPU; with fewer than two of them, processes on the CPU."""
    on_gpu, count = placement.devices[0].type == "cuda", max(2, placement.num_processes_to_launch)
    if on_gpu and placement.num_processes_to_launch < 2:
        yield Finding("all-reduce (nccl)", "not checked", "it takes two GPUs; on the CPU instead:")
    if not on_gpu or placement.num_processes_to_launch < 2:
        placement = Placement("ddp", (torch.device("cpu"),) * count, count, "doctor")
    try:
        measured = bandwidth.measure_in_workers(placement)
    except WorkersFailed as failed:
        evidence = f"{placement.num_processes_to_launch} workers could not all-reduce: {failed.problem}"
        yield Finding("all-reduce", "fail", evidence, "NCCL_DEBUG=INFO before the same command shows where it ended")
        return
    yield from bandwidth.judge_allreduce(measured)


_GIB = 2.0**30


def check_model(config: Config) -> Iterator[Finding]:
    """Run forward and backward passes of the requested micro-batch, then of larger ones."""
    if uses_environments(config):
        yield Finding("model", "ok", "it acts in environments: there is nothing to try before the first rollouts")
        return
    if estimate := estimate_training(config):
        yield judge_estimate(estimate)
        return
    placement = place_on_one_device(config.device)
    world = World(placement.devices[0])
    with tempfile.TemporaryDirectory(prefix="multigpu-doctor-") as folder:

        def try_batch(size: object) -> TrainComponents:
            settings = {"num_workers": 0, "multi_gpu": "none", "batch_size": size, "grad_accum_steps": None}
            components, _ = build_probed(replace_settings(config, settings), placement, world, folder)
            components.loaders.train.close()
            return components

        try:
            if config.batch.size != "auto":
                components = try_batch(config.batch.size)
                yield _judge_batch_size(components, int(config.batch.size))
                if components.world.device.type != "cuda":
                    return
            components = try_batch("auto")
            batches = components.plan.batches
            reason = components.plan.batch_size_reason or "larger ones are no faster here"
            yield Finding("largest batch", "ok", f"--batch-size {batches.micro_batch} a device: {reason}")
        except RequestError:
            raise
        except TrainingError as error:
            yield Finding("model", "fail", error.problem, error.remedy)


def judge_estimate(estimate: ConfigEstimate) -> Finding:
    """Whether a pretrained model fits that was not run."""
    memory, rows, capacity, fits = estimate.memory, estimate.rows, estimate.capacity, estimate.fits
    kept = f"{format_bytes(memory.activations(rows))} for --batch-size {rows} of {estimate.tokens:,} tokens"
    evidence = (
        f"{estimate.folder}, {estimate.parameters:,} parameters ({estimate.trained:,} trained): "
        f"{format_bytes(estimate.state_bytes)} for weights, gradients and the optimizer, "
        + (f"activations not counted ({estimate.activations})" if estimate.activations else kept)
        + f"\ncomputed from config.json, not measured: {estimate.reason}"
        + "; the weights are counted whole, which take less in 4 bits" * estimate.quantized
    )
    numbers = {"state_bytes": estimate.state_bytes, "capacity": capacity, "largest_batch": fits}
    if capacity is None:
        return Finding("model", "not checked", f"no GPU here to compare with: {evidence}", numbers=numbers)
    evidence = f"{evidence}; the GPU has {format_bytes(capacity)}"
    if estimate.state_bytes > FILLED * capacity or fits == 0:
        fix = "--multi-gpu fsdp over several GPUs; --adapter lora; a shorter --max-length with --grad-checkpointing"
        return Finding("model", "fail", evidence, fix, numbers)
    if fits is not None and fits < rows:
        fix = f"--batch-size {fits}, with more --grad-accum-steps for the same global batch"
        return Finding("model", "warn", evidence, fix, numbers)
    return Finding("model", "ok", evidence, numbers=numbers)


def _judge_batch_size(components: TrainComponents, size: int) -> Finding:
    evidence = f"{components.spec.model}, {sum(p.numel() for p in components.state.model.parameters()):,} parameters"
    device, fits = components.world.device, components.plan.batches.micro_batch
    if fits < size:
        fix = f"--batch-size {fits}, with more --grad-accum-steps for the same global batch"
        return Finding("model", "warn", f"{evidence}: --batch-size {size} does not fit, {fits} does", fix)
    if device.type != "cuda":
        return Finding("model", "ok", f"{evidence}: --batch-size {size} runs on the CPU; no GPU to try it on")
    peak, total = measure_peak_memory(components), torch.cuda.get_device_properties(device).total_memory
    return Finding("model", "ok", f"{evidence}: --batch-size {size} takes {peak / _GIB:.2f} of {total / _GIB:.0f} GiB")
