"""Processes as the system knows them: what they are, whose, and whether their launcher has gone (Linux, by /proc)."""

import os
import pwd
from collections.abc import Iterable
from pathlib import Path

from multigpu_cli.commands.doctor_gpus import Tenancy

_PROC = Path("/proc")
_LONGEST = 100  # letters of a command


def known(on_gpus: Iterable[int], proc: Path = _PROC) -> dict[int, Tenancy]:
    """The processes with these numbers, and of all others the orphaned workers of ours."""
    wanted = set(on_gpus)
    found = {}
    for entry in proc.glob("[0-9]*"):
        pid = int(entry.name)
        if pid == os.getpid() or (pid not in wanted and not _ours(entry)):
            continue
        tenancy = _read(entry)
        if tenancy and (pid in wanted or tenancy.orphan):
            found[pid] = tenancy
    return found


def _ours(entry: Path) -> bool:
    try:
        return entry.stat().st_uid == os.getuid()
    except OSError:
        return False


def _read(entry: Path) -> Tenancy | None:
    """None for a process that has ended meanwhile."""
    try:
        owner = entry.stat().st_uid
        command = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None
    orphan = parent == 1 and _is_worker(entry)
    return Tenancy(int(entry.name), command[:_LONGEST], _name(owner), owner == os.getuid(), orphan)


def _is_worker(entry: Path) -> bool:
    """Whether torchrun, or whoever speaks like it, gave it a rank."""
    try:
        variables = entry.joinpath("environ").read_bytes().split(b"\0")
    except OSError:  # not ours to read
        return False
    return any(variable.startswith(b"LOCAL_RANK=") for variable in variables)


def _name(owner: int) -> str:
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)
