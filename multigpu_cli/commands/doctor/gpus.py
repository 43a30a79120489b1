"""The doctor's view of versions and GPUs: facts in, findings out, so that it can be tested without a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from multigpu_cli.commands.doctor.findings import Finding
from multigpu_cli.monitor.gpu import Gpu

_GIB = 2.0**30
_MUCH = 0.05  # share of a GPU's memory that counts as in use


@dataclass(frozen=True)
class GpuProcessInfo:
    """A process on a GPU, as the system knows it.

    Attributes:
        user: its owner. ours: the owner is we. orphan: a worker of torchrun whose agent is gone.
    """

    pid: int
    command: str
    user: str
    ours: bool
    orphan: bool


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What was found out about this machine's GPUs and software.

    Attributes:
        cuda, cudnn, nccl, hip: what torch was built with; None without.
        architectures: as torch names them: sm_90, compute_90.
        visible: GPUs that torch can use.
        hidden: CUDA_VISIBLE_DEVICES, None where it is not set.
        no_nvml: why NVML can't be asked; empty where it can.
        driver, driver_cuda: the driver's version, and the newest CUDA that it runs.
        peers: whether GPU i of torch reaches GPU j's memory; None where it was not asked.
        tenants: the processes on the GPUs by pid.
    """

    python: str
    torch: str
    cuda: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    hip: str | None = None
    architectures: Sequence[str] = ()
    visible: int = 0
    hidden: str | None = None
    no_nvml: str = ""
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    gpus: Sequence[Gpu] = ()
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    peers: Sequence[Sequence[bool]] | None = None
    tenants: dict[int, GpuProcessInfo] = field(default_factory=dict)


def check_gpus(facts: MachineFacts) -> Iterator[Finding]:
    """Everything that the facts say."""
    yield _check_versions(facts)
    yield from _check_visibility(facts)
    for gpu in facts.gpus:
        yield _check_gpu(gpu, facts)
    yield from _check_leftovers(facts)
    if len(reachable := [gpu for gpu in facts.gpus if not gpu.unreachable]) > 1:
        yield _check_equal(reachable)
    yield from _check_connections(facts)


def _check_versions(facts: MachineFacts) -> Finding:
    known = {"CUDA": facts.cuda, "ROCm": facts.hip, "cuDNN": facts.cudnn, "NCCL": facts.nccl, "driver": facts.driver}
    evidence = f"Python {facts.python}, torch {facts.torch}, "
    evidence += ", ".join(f"{name} {version}" for name, version in known.items() if version) or "built for CPU only"
    if facts.cuda and facts.driver_cuda:
        built, newest = _parse_version(facts.cuda), facts.driver_cuda
        evidence += f" (runs CUDA up to {newest[0]}.{newest[1]})"
        if built[0] > newest[0]:
            remedy = f"a newer NVIDIA driver, or a torch built for CUDA {newest[0]}.{newest[1]} or older"
            return Finding("versions", "fail", evidence, remedy)
        if built > newest:
            fix = "a newer driver, if a kernel fails to load: minor versions are meant to go together"
            return Finding("versions", "warn", evidence, fix)
    return Finding("versions", "ok", evidence)


def _check_visibility(facts: MachineFacts) -> Iterator[Finding]:
    """Whether torch sees the GPUs that are there."""
    if facts.no_nvml and not facts.visible:
        yield Finding("GPUs", "not checked", f"torch sees none ({facts.no_nvml})")
        return
    if facts.no_nvml:
        kind = "ROCm has no NVML" if facts.hip else facts.no_nvml
        missing = "memory, users, temperature and topology stay unknown"
        fix = "" if facts.hip else "pip install nvidia-ml-py"
        yield Finding("GPUs", "warn", f"torch sees {facts.visible}, but {kind}: {missing}", fix)
        return
    count = f"{len(facts.gpus)} on this machine, {facts.visible} visible to torch"
    if facts.gpus and not facts.cuda:
        yield Finding("GPUs", "fail", f"{count}: this torch was built for CPU only", "pip install torch, for CUDA")
    elif facts.gpus and not facts.visible and facts.hidden == "":
        yield Finding("GPUs", "warn", f"{count}: CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES")
    elif facts.gpus and not facts.visible:
        yield Finding("GPUs", "fail", f"{count}", "python -c 'import torch; torch.zeros(1).cuda()' says why")
    elif facts.visible < len(facts.gpus):
        evidence = f"{count} (CUDA_VISIBLE_DEVICES={facts.hidden})" if facts.hidden else count
        yield Finding("GPUs", "ok", evidence)
    else:
        yield Finding("GPUs", "ok" if facts.gpus else "not checked", count)


def _check_gpu(gpu: Gpu, facts: MachineFacts) -> Finding:
    name, evidence = f"GPU {gpu.number}", gpu.name
    if gpu.unreachable:
        fix = "reboot where it is lost; meanwhile CUDA_VISIBLE_DEVICES without it"
        return Finding(name, "fail", f"can't be asked: {gpu.unreachable}", fix)
    if gpu.memory_total is not None and gpu.memory_used is not None:
        free = (gpu.memory_total - gpu.memory_used) / _GIB
        evidence += f", {gpu.memory_total / _GIB:.1f} GiB ({free:.1f} free)"
    if gpu.capability:
        evidence += f", compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    extra = ((gpu.utilisation, "{} % busy"), (gpu.temperature, "{} °C"), (gpu.power, "{:.0f} W"))
    evidence += "".join(f", {form.format(value)}" for value, form in extra if value is not None)
    if gpu.capability and facts.architectures and not _has_kernels(gpu.capability, facts.architectures):
        built = " ".join(facts.architectures)
        return Finding(
            name, "fail", f"{evidence}\nthis torch has no kernels for it, only {built}", "another build of torch"
        )
    if gpu.mig:
        return Finding(
            name, "warn", f"{evidence}\ncut into MIG instances: NCCL can't join those", "one process per instance"
        )
    users = [_describe_process(tenant.pid, tenant.memory, facts) for tenant in gpu.processes]
    busy = (gpu.utilisation or 0) > 10 or (gpu.memory_used or 0) > _MUCH * (gpu.memory_total or 0)
    if busy and users:
        others = ",".join(str(other.number) for other in facts.gpus if other.number != gpu.number)
        fix = f"wait for them, or use other GPUs: CUDA_VISIBLE_DEVICES={others}" if others else "wait for them"
        return Finding(name, "warn", "\n".join([evidence, *(f"in use by {user}" for user in users)]), fix)
    if busy:
        return Finding(name, "warn", f"{evidence}\nin use, by a process that can't be seen from here", "nvidia-smi")
    return Finding(name, "ok", evidence)


def _describe_process(pid: int, memory: int | None, facts: MachineFacts) -> str:
    held = f" with {memory / _GIB:.1f} GiB" if memory else ""
    known = facts.tenants.get(pid)
    return f"process {pid}{held}: {known.command} ({known.user})" if known else f"process {pid}{held}"


def _check_leftovers(facts: MachineFacts) -> Iterator[Finding]:
    left = [known for known in facts.tenants.values() if known.orphan and known.ours]
    if left:
        evidence = "\n".join(
            f"process {known.pid} is a worker whose launcher is gone: {known.command}" for known in left
        )
        yield Finding("leftovers", "warn", evidence, f"kill {' '.join(str(known.pid) for known in left)}")
    else:
        yield Finding("leftovers", "ok", "no worker of yours has outlived its launcher")


def _check_equal(gpus: Sequence[Gpu]) -> Finding:
    kinds = {(gpu.name, gpu.capability, round(_memory(gpu) / _GIB)) for gpu in gpus}
    if len(kinds) == 1:
        return Finding("equal GPUs", "ok", f"{len(gpus)} of one kind")
    least = min(gpus, key=_memory)
    evidence = "; ".join(f"GPU {gpu.number} {gpu.name} {_memory(gpu) / _GIB:.0f} GiB" for gpu in gpus)
    evidence += (
        f"\nshares are equal, so the slowest sets the pace, and GPU {least.number} with the least memory the batch"
    )
    best = [gpu.number for gpu in gpus if (gpu.name, _memory(gpu)) == _most_common(gpus)]
    listed = ",".join(map(str, best))
    return Finding("equal GPUs", "warn", evidence, f"only GPUs of one kind: CUDA_VISIBLE_DEVICES={listed}")


def _most_common(gpus: Sequence[Gpu]) -> tuple[str, int]:
    kinds = [(gpu.name, _memory(gpu)) for gpu in gpus]
    return max(kinds, key=lambda kind: (kinds.count(kind), kind[1]))


def _memory(gpu: Gpu) -> int:
    return gpu.memory_total or 0


def _check_connections(facts: MachineFacts) -> Iterator[Finding]:
    if len(facts.gpus) > 1:
        wires = sorted(set(facts.links.values()))
        each = "; ".join(
            f"{wire}: {_format_pairs(pair for pair in facts.links if facts.links[pair] == wire)}" for wire in wires
        )
        far = any(wire in ("across CPU sockets", "unknown") for wire in wires)
        fix = "NCCL goes through host memory there; GPUs that are near each other are faster" if far else ""
        yield Finding("topology", "warn" if far else "ok", each, fix)
    if facts.peers is not None and len(facts.peers) > 1:
        count = range(len(facts.peers))
        apart = [(one, other) for one in count for other in count if one < other and not facts.peers[one][other]]
        if apart:
            evidence = f"no direct access between {_format_pairs(apart)}: their traffic goes through host memory"
            yield Finding(
                "peer access", "warn", evidence, "nvidia-smi topo -p2p r; IOMMU or ACS in the BIOS may forbid it"
            )
        else:
            yield Finding("peer access", "ok", "every GPU reaches every other's memory")


def _format_pairs(pairs: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> str:
    names = [f"{one}-{other}" for one, other in pairs]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether torch has kernels: of the same major version and no newer minor, or as PTX of an older one."""
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = "".join(letter for letter in number if letter.isdigit())
        built = (int(digits[:-1]), int(digits[-1]))
        fits = built[0] == capability[0] and built <= capability if kind == "sm" else built <= capability
        if fits:
            return True
    return False


def _parse_version(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)
