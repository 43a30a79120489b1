import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from multigpu_cli.commands.doctor.gpus import find_gpu_processes


def process(proc: Path, pid: int, *, parent: int, environ: bytes) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"python\0train (1).py\0")
    (folder / "stat").write_text(f"{pid} (py) thon) S {parent} 0 0")
    (folder / "environ").write_bytes(environ)


def test_orphaned_workers_are_found(tmp_path: Path) -> None:
    """A worker of a launcher that is gone; not one whose launcher lives, nor a process that was left on purpose."""
    process(tmp_path, 11, parent=1, environ=b"A=1\0LOCAL_RANK=0\0")
    process(tmp_path, 12, parent=11, environ=b"LOCAL_RANK=0\0")
    process(tmp_path, 13, parent=1, environ=b"LOCAL_RANKS=0\0")
    (tmp_path / "14").mkdir()  # has ended meanwhile
    found = find_gpu_processes([13, 14], tmp_path)
    assert {pid: each.orphan for pid, each in found.items()} == {11: True, 13: False}
    assert (found[11].command, found[11].ours) == ("python train (1).py", True)


def test_a_real_process_is_described() -> None:
    here: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], **here) as child:
        assert child.stdout
        child.stdout.readline()  # for a moment after it begins, a process has no command line
        found = find_gpu_processes([child.pid])
        child.communicate(b"\n")
    assert found[child.pid].command.endswith("-c print(flush=True); input()")
    assert (found[child.pid].orphan, found[child.pid].ours) == (False, True)
    assert os.getpid() not in find_gpu_processes([os.getpid()])
