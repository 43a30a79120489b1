"""The doctor's checks of versions and GPUs: facts in, findings out, so that they can be tested without a GPU."""

import os
import pwd
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from multigpu_cli.commands.doctor.system import Finding, warn_if
from multigpu_cli.monitor.gpu import Gpu

_GIB = 2.0**30
_MUCH = 0.05  # share of a GPU's memory that counts as in use


@dataclass(frozen=True)
class GpuProcessInfo:
    """A process on a GPU, as the system knows it; an orphan is a worker of torchrun whose agent is gone."""

    pid: int
    command: str
    user: str
    ours: bool
    orphan: bool


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """This machine's GPUs and software; cuda, cudnn, nccl and hip are what torch was built with, or None."""

    python: str
    torch: str
    cuda: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    hip: str | None = None
    architectures: Sequence[str] = ()  # as torch names them: sm_90, compute_90
    visible: int = 0
    hidden: str | None = None  # CUDA_VISIBLE_DEVICES, None where it is not set
    no_nvml: str = ""  # why NVML can't be queried; empty where it can
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None  # the newest that the driver runs
    gpus: Sequence[Gpu] = ()
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    peers: Sequence[Sequence[bool]] | None = None  # whether GPU i reaches the memory of GPU j; None with fewer than two
    tenants: dict[int, GpuProcessInfo] = field(default_factory=dict)


def check_gpus(facts: MachineFacts) -> Iterator[Finding]:
    """All findings about versions and GPUs."""
    yield _check_versions(facts)
    yield from _check_visibility(facts)
    for gpu in facts.gpus:
        yield _check_gpu(gpu, facts)
    left = [process for process in facts.tenants.values() if process.orphan and process.ours]
    lines = [f"process {process.pid} is a worker whose launcher is gone: {process.command}" for process in left]
    evidence = "\n".join(lines) or "no worker of yours has outlived its launcher"
    yield warn_if(bool(left), "leftovers", evidence, f"kill {' '.join(str(process.pid) for process in left)}")
    if len(reachable := [gpu for gpu in facts.gpus if not gpu.unreachable]) > 1:
        yield _check_equal(reachable)
    yield from _check_connections(facts)


def _check_versions(facts: MachineFacts) -> Finding:
    known = {"CUDA": facts.cuda, "ROCm": facts.hip, "cuDNN": facts.cudnn, "NCCL": facts.nccl, "driver": facts.driver}
    evidence = f"Python {facts.python}, torch {facts.torch}, "
    evidence += ", ".join(f"{name} {version}" for name, version in known.items() if version) or "built for CPU only"
    if facts.cuda and facts.driver_cuda:
        major, minor, *_ = *map(int, facts.cuda.split(".")), 0
        built, newest = (major, minor), facts.driver_cuda
        evidence += f" (runs CUDA up to {newest[0]}.{newest[1]})"
        if built[0] > newest[0]:
            remedy = f"a newer NVIDIA driver, or a torch built for CUDA {newest[0]}.{newest[1]} or older"
            return Finding("versions", "fail", evidence, remedy)
        if built > newest:
            fix = "a newer driver, if a kernel fails to load: minor versions should match"
            return Finding("versions", "warn", evidence, fix)
    return Finding("versions", "ok", evidence)


def _check_visibility(facts: MachineFacts) -> Iterator[Finding]:
    if facts.no_nvml and not facts.visible:
        yield Finding("GPUs", "not checked", f"torch sees none ({facts.no_nvml})")
        return
    if facts.no_nvml:
        kind = "ROCm has no NVML" if facts.hip else facts.no_nvml
        missing = "memory, users, temperature and topology are unknown"
        fix = "" if facts.hip else "pip install nvidia-ml-py"
        yield Finding("GPUs", "warn", f"torch sees {facts.visible}, but {kind}: {missing}", fix)
        return
    count = f"{len(facts.gpus)} on this machine, {facts.visible} visible to torch"
    if facts.gpus and not facts.cuda:
        yield Finding("GPUs", "fail", f"{count}: this torch was built for CPU only", "pip install torch, for CUDA")
    elif facts.gpus and not facts.visible and facts.hidden == "":
        yield Finding("GPUs", "warn", f"{count}: CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES")
    elif facts.gpus and not facts.visible:
        yield Finding("GPUs", "fail", count, "python -c 'import torch; torch.zeros(1).cuda()' says why")
    elif facts.visible < len(facts.gpus):
        evidence = f"{count} (CUDA_VISIBLE_DEVICES={facts.hidden})" if facts.hidden else count
        yield Finding("GPUs", "ok", evidence)
    else:
        yield Finding("GPUs", "ok" if facts.gpus else "not checked", count)


def _check_gpu(gpu: Gpu, facts: MachineFacts) -> Finding:
    name, evidence = f"GPU {gpu.number}", gpu.name
    if gpu.unreachable:
        fix = "reboot if the GPU is lost; until then, leave it out of CUDA_VISIBLE_DEVICES"
        return Finding(name, "fail", f"can't be queried: {gpu.unreachable}", fix)
    busy, celsius, watts, used, memory = gpu.load
    if memory is not None and used is not None:
        evidence += f", {memory / _GIB:.1f} GiB ({(memory - used) / _GIB:.1f} free)"
    if gpu.capability:
        evidence += f", compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    extra = ((busy, "{} % busy"), (celsius, "{} °C"), (watts, "{:.0f} W"))
    evidence += "".join(f", {form.format(value)}" for value, form in extra if value is not None)
    if gpu.capability and facts.architectures and not _has_kernels(gpu.capability, facts.architectures):
        evidence += f"\nthis torch has no kernels for it, only {' '.join(facts.architectures)}"
        return Finding(name, "fail", evidence, "another build of torch")
    if gpu.mig:
        evidence += "\nsplit into MIG instances: NCCL can't connect those"
        return Finding(name, "warn", evidence, "one process per instance")
    users = [_describe_process(tenant.pid, tenant.memory, facts) for tenant in gpu.processes]
    in_use = (busy or 0) > 10 or (used or 0) > _MUCH * (memory or 0)
    if in_use and users:
        others = ",".join(str(other.number) for other in facts.gpus if other.number != gpu.number)
        fix = f"wait for them, or use other GPUs: CUDA_VISIBLE_DEVICES={others}" if others else "wait for them"
        return Finding(name, "warn", "\n".join([evidence, *(f"in use by {user}" for user in users)]), fix)
    if in_use:
        return Finding(name, "warn", f"{evidence}\nin use by a process that is not visible from here", "nvidia-smi")
    return Finding(name, "ok", evidence)


def _describe_process(pid: int, memory: int | None, facts: MachineFacts) -> str:
    held = f" with {memory / _GIB:.1f} GiB" if memory else ""
    known = facts.tenants.get(pid)
    return f"process {pid}{held}: {known.command} ({known.user})" if known else f"process {pid}{held}"


def _check_equal(gpus: Sequence[Gpu]) -> Finding:
    kinds = {(gpu.name, gpu.capability, round(_memory(gpu) / _GIB)) for gpu in gpus}
    if len(kinds) == 1:
        return Finding("equal GPUs", "ok", f"{len(gpus)} of one kind")
    least = min(gpus, key=_memory)
    evidence = "; ".join(f"GPU {gpu.number} {gpu.name} {_memory(gpu) / _GIB:.0f} GiB" for gpu in gpus)
    batch_limit = f"GPU {least.number} with the least memory the batch"
    evidence += f"\nall get equal shares: the slowest GPU limits the speed, {batch_limit}"
    models = [(gpu.name, _memory(gpu)) for gpu in gpus]
    usual = max(models, key=lambda model: (models.count(model), model[1]))
    listed = ",".join(str(gpu.number) for gpu, model in zip(gpus, models, strict=True) if model == usual)
    return Finding("equal GPUs", "warn", evidence, f"only GPUs of one kind: CUDA_VISIBLE_DEVICES={listed}")


def _memory(gpu: Gpu) -> int:
    return gpu.load.memory_total or 0


def _check_connections(facts: MachineFacts) -> Iterator[Finding]:
    if len(facts.gpus) > 1:
        pairs_of: dict[str, list[tuple[int, int]]] = {}
        for pair, link in facts.links.items():
            pairs_of.setdefault(link, []).append(pair)
        evidence = "; ".join(f"{link}: {_format_pairs(pairs_of[link])}" for link in sorted(pairs_of))
        far = not pairs_of.keys().isdisjoint({"across CPU sockets", "unknown"})
        fix = "NCCL goes through host memory there; GPUs that are near each other are faster"
        yield warn_if(far, "topology", evidence, fix)
    if facts.peers is not None and len(facts.peers) > 1:
        apart = [(i, j) for i, j in combinations(range(len(facts.peers)), 2) if not facts.peers[i][j]]
        evidence = "every GPU reaches every other's memory"
        if apart:
            evidence = f"no direct access between {_format_pairs(apart)}: their traffic goes through host memory"
        fix = "nvidia-smi topo -p2p r; IOMMU or ACS in the BIOS may forbid it"
        yield warn_if(bool(apart), "peer access", evidence, fix)


def _format_pairs(pairs: Iterable[tuple[int, int]]) -> str:
    names = [f"{one}-{other}" for one, other in pairs]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether torch has kernels: of the same major version and no newer minor, or as PTX of an older one."""
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = "".join(filter(str.isdigit, number))
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= capability and (kind != "sm" or built[0] == capability[0]):
            return True
    return False


_PROC = Path("/proc")
_LONGEST = 100  # letters of a command


def find_gpu_processes(on_gpus: Iterable[int], proc: Path = _PROC) -> dict[int, GpuProcessInfo]:
    """The processes with these numbers, and all orphaned workers of this user."""
    wanted = set(on_gpus)
    processes = {}
    for entry in proc.glob("[0-9]*"):
        pid = int(entry.name)
        process = _read_process(entry) if pid != os.getpid() else None
        if process and (pid in wanted or (process.ours and process.orphan)):
            processes[pid] = process
    return processes


def _read_process(entry: Path) -> GpuProcessInfo | None:
    """None for a process that has ended in the meantime."""
    try:
        owner = entry.stat().st_uid
        command = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None
    try:
        user = pwd.getpwuid(owner).pw_name
    except KeyError:
        user = str(owner)
    orphan = parent == 1 and _is_worker(entry)
    return GpuProcessInfo(int(entry.name), command[:_LONGEST], user, owner == os.getuid(), orphan)


def _is_worker(entry: Path) -> bool:
    """Whether torchrun, or a launcher like it, gave the process a rank."""
    try:
        variables = entry.joinpath("environ").read_bytes().split(b"\0")
    except OSError:  # another user's
        return False
    return any(variable.startswith(b"LOCAL_RANK=") for variable in variables)
