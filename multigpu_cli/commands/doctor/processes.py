"""Processes of this machine, from /proc (Linux): their command, their user, and whether their launcher is gone."""

import os
import pwd
from collections.abc import Iterable
from pathlib import Path

from multigpu_cli.commands.doctor.gpus import GpuProcessInfo

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
    orphan = parent == 1 and _is_worker(entry)
    return GpuProcessInfo(int(entry.name), command[:_LONGEST], _user_name(owner), owner == os.getuid(), orphan)


def _is_worker(entry: Path) -> bool:
    """Whether torchrun, or a launcher like it, gave the process a rank."""
    try:
        variables = entry.joinpath("environ").read_bytes().split(b"\0")
    except OSError:  # another user's
        return False
    return any(variable.startswith(b"LOCAL_RANK=") for variable in variables)


def _user_name(owner: int) -> str:
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)
