"""The doctor's findings, and its checks of everything but GPUs: shared memory, limits, ports, disk, cores."""

import os
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from multigpu_cli.errors import FAILED, pluralize

Verdict = Literal["ok", "warn", "fail", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One check: what was seen, what mends it ("" where nothing is wrong), and the measured figures, for machines."""

    name: str
    verdict: Verdict
    evidence: str
    fix: str = ""
    numbers: dict[str, Any] | None = None


def warn_if(bad: bool, name: str, evidence: str, fix: str, numbers: dict[str, Any] | None = None) -> Finding:
    """A warning with its fix where something is bad, else a finding that is ok."""
    return Finding(name, "warn" if bad else "ok", evidence, fix if bad else "", numbers)


def choose_exit_code(findings: Iterable[Finding]) -> int:
    """1 where a check has failed, else 0."""
    return FAILED if any(finding.verdict == "fail" for finding in findings) else 0


def format_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """A line each, its fix below it, and the count of each verdict."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        unchecked = finding.verdict == "not checked"
        mark = "-" if unchecked else finding.verdict
        evidence = f"not checked: {finding.evidence}" if unchecked else finding.evidence
        first, *more = evidence.splitlines()
        yield f"{mark:<4}  {finding.name:<{width}}  {first}"
        for line in [*more, *([f"fix: {finding.fix}"] if finding.fix else [])]:
            yield f"{'':<{width + 8}}{line}"
    counts = Counter(finding.verdict for finding in findings)
    wrong = f"{pluralize(counts['warn'], 'warning')}, {pluralize(counts['fail'], 'failure')}"
    yield f"{counts['ok']} ok, {wrong}, {counts['not checked']} not checked"


_SHM = Path("/dev/shm")
_GIB = 2.0**30
_TORCHRUN_PORT = 29500
_WRITTEN = 64 * 2**20  # bytes
_LOOPBACK = ("::ffff:127.0.0.1", 0, 0, 0)  # as torch's store sees a connection from 127.0.0.1


def check_system(save_dir: Path, cores: int, workers: int) -> Iterator[Finding]:
    """All findings about the system, whose cores so many GPUs, or CPU processes, share; save_dir need not exist."""
    yield check_shared_memory(_SHM)
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_ports(_TORCHRUN_PORT)
    yield check_host_name(socket.gethostname())
    yield check_reverse_lookups(_time_lookups())
    yield check_disk(save_dir)
    yield check_cores(cores, workers)


def check_shared_memory(place: Path) -> Finding:
    """Loader processes pass batches through shared memory, and NCCL connects processes by it."""
    if not place.is_dir():
        return Finding("shared memory", "not checked", f"there is no {place} here")
    usage = shutil.disk_usage(place)
    evidence = f"{place}: {usage.total / _GIB:.2f} GiB, {usage.free / _GIB:.2f} free"
    fix = f"docker run --shm-size=8g …, or mount -o remount,size=8G {place}, or --num-workers 0"
    return warn_if(usage.free < _GIB, "shared memory", evidence, fix, {"free_bytes": usage.free})


def check_open_files(limits: tuple[int, int]) -> Finding:
    """Each process, loader and connection opens some files."""
    soft, hard = limits
    evidence = f"{_format_limit(soft)} at once, at most {_format_limit(hard)}"
    few = soft != resource.RLIM_INFINITY and soft < 4096
    target = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    return warn_if(few, "open files", evidence, f"ulimit -n {target}", {"soft": soft})


def check_ports(usual: int) -> Finding:
    """Whether a socket can listen on localhost, and whether torchrun's default port is free."""
    try:
        with socket.create_server(("localhost", 0)) as server:
            free = server.getsockname()[1]
    except OSError as error:
        return Finding("ports", "fail", f"no port can be opened on localhost: {error}", "ip link set lo up; /etc/hosts")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", usual)) == 0:
            fix = "torchrun --standalone, which takes a free one"
            return Finding("ports", "warn", f"localhost works, but {usual}, torchrun's default, is in use", fix)
    return Finding("ports", "ok", f"localhost works (got {free}), {usual} is free")


def check_host_name(name: str) -> Finding:
    """torchrun's workers find each other by the machine's name."""
    began = time.perf_counter()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        fix = f"echo '127.0.1.1 {name}' >> /etc/hosts"
        return Finding("host name", "warn", f"{name} has no address ({error}): torchrun may not find it", fix)
    seconds = time.perf_counter() - began
    evidence = f"{name} is {address}, found in {1e3 * seconds:.0f} ms"
    return warn_if(seconds > 1, "host name", evidence, f"{name} in /etc/hosts")


def check_reverse_lookups(seconds: Sequence[float]) -> Finding:
    """torch's store looks up the host name of each connection, at both ends; at its own end one after the other.

    If a name server does not answer, each look-up takes five seconds or more, before the first step and in a restart.
    """
    slowest = max(seconds)
    evidence = f"the slowest of {len(seconds)} look-ups of {_LOOPBACK[0]} took {1e3 * slowest:.0f} ms"
    if slow := slowest > 0.5:
        evidence += "; a run of several workers waits for such look-ups twice for each connection"
    fix = f"echo '{_LOOPBACK[0]} localhost' >> /etc/hosts, or a name server that answers"
    return warn_if(slow, "names of connections", evidence, fix, {"seconds": slowest})


def _time_lookups() -> list[float]:
    """Seconds of some look-ups, several at a time, as when workers start."""

    def time_lookup(_: int) -> float:
        began = time.perf_counter()
        with suppress(OSError):  # no name: the time counts
            socket.getnameinfo(_LOOPBACK, 0)
        return time.perf_counter() - began

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(time_lookup, range(32)))


def check_disk(save_dir: Path) -> Finding:
    """Space and the speed at which a checkpoint reaches the disk."""
    place = next(path for path in (save_dir, *save_dir.absolute().parents) if path.exists())
    name = f"disk ({save_dir})"
    try:
        rate, flush = _measure_writes(place)
    except OSError as error:
        return Finding(name, "fail", f"{place} can't be written: {error.strerror or error}", "another --save-dir")
    free = shutil.disk_usage(place).free
    evidence = f"{free / _GIB:.1f} GiB free, {rate / 2**20:.0f} MiB/s with fsync, {1e3 * flush:.1f} ms for a small one"
    numbers = {"free_bytes": free, "bytes_per_second": rate, "small_fsync_seconds": flush}
    if free < 5 * _GIB:
        verdict: Verdict = "fail" if free < 0.2 * _GIB else "warn"
        return Finding(name, verdict, evidence, "free some space, or another --save-dir", numbers)
    fix = "a local disk for --save-dir, or fewer checkpoints: --checkpoint-every 30m"
    return warn_if(rate < 20 * 2**20, name, evidence, fix, numbers)


def check_cores(cores: int, workers: int) -> Finding:
    """Loading and launching need CPU time."""
    share = f"{cores / max(1, workers):.3g} for each of {pluralize(workers, 'worker')}"
    evidence = f"{cores} that this process may use, {share}"
    fix = "more cores (taskset, the container's or the job's limit), or fewer workers; loading may limit the speed"
    return warn_if(cores < 2 * workers, "CPU cores", evidence, fix, {"cores": cores})


def _measure_writes(place: Path) -> tuple[float, float]:
    """Bytes a second of a large file, and the median seconds of small ones, each until it is on disk."""
    with tempfile.TemporaryFile(dir=place) as file:

        def time_write(block: bytes) -> float:
            began = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return time.perf_counter() - began

        rate = _WRITTEN / time_write(os.urandom(_WRITTEN))
        return rate, statistics.median(time_write(b"x") for _ in range(5))


def _format_limit(number: int) -> str:
    return "any number" if number == resource.RLIM_INFINITY else f"{number:,}"
