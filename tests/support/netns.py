"""Several "hosts" on one machine: network namespaces on one virtual switch, each with address, hostname and hosts file.

Needs root and iproute2. Whatever happens, processes and namespaces are gone afterwards.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRONT_DOOR = str(ROOT / "main_multi_gpu.py")
PORT = 29400
_INSIDE = 'mount --bind "$1" /etc/hosts; mount --bind "$2" /etc/resolv.conf; hostname "$3"; shift 3; exec "$@"'


def missing() -> str:
    """Why there can be no namespaces here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "network namespaces need iproute2 (apt install iproute2) and unshare"
    tried = subprocess.run(["ip", "netns", "add", f"try{os.getpid()}"], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    _ip("netns", "del", f"try{os.getpid()}")
    return ""


class Host:
    """One namespace.

    Attributes:
        name: its hostname.
        address: of its interface eth0.
        folder: its working directory, which no other host has.
    """

    def __init__(self, name: str, number: int, space: str, switch: str, scratch: Path) -> None:
        self.name, self.address, self.space, self._switch = name, f"10.77.0.{number}", space, switch
        self._port, self._scratch = f"port{number}", scratch
        self.folder = scratch / name
        self.folder.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], *, folder: Path | None = None, log: str = "log", **environ: str
    ) -> "subprocess.Popen[bytes]":
        """Start a command on this host; what it says goes into a file of its scratch folder."""
        files = [str(self._scratch / "hosts"), str(self._scratch / "resolv.conf")]
        inside = ["unshare", "--uts", "--mount", "sh", "-c", _INSIDE, "sh", *files, self.name, *command]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with open(self.log(log), "ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, *inside],
                cwd=folder or self.folder,
                env=environment | {"GLOO_SOCKET_IFNAME": "eth0"} | environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def run(self, command: Sequence[str], *, folder: Path | None = None, seconds: float = 120, **environ: str) -> str:
        """Run a command on this host to its end; what it said.

        Raises:
            AssertionError: it failed.
        """
        self.log("run").unlink(missing_ok=True)
        process = self.start(command, folder=folder, log="run", **environ)
        code = process.wait(seconds)
        said = self.log("run").read_text()
        assert code == 0, f"{self.name}: {command} ended with {code}\n{said}"
        return said

    def log(self, name: str = "log") -> Path:
        return self._scratch / f"{self.name}.{name}"

    def processes(self) -> list[int]:
        return [int(word) for word in _ip("netns", "pids", self.space).split()]

    def kill(self) -> None:
        """The host loses power: all its processes are gone at once."""
        until = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for process in self._started:
            process.wait()

    def cut_off(self) -> None:
        """Somebody pulls the cable at the switch: packets are lost, and nobody is told."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def reconnect(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def inside(self, *command: str) -> str:
        """A command of the system's in this namespace: ip, tc, iptables."""
        done = subprocess.run(["ip", "netns", "exec", self.space, *command], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout


@contextmanager
def hosts(names: Sequence[str], scratch: Path) -> Iterator[list[Host]]:
    """So many hosts on one switch, for as long as the context lasts."""
    mark = f"mg{os.getpid()}-{time.monotonic_ns() % 10**6}"
    spaces = [f"{mark}-{name}" for name in names]
    lines = ["127.0.0.1 localhost", *(f"10.77.0.{number} {name}" for number, name in enumerate(names, 1))]
    (scratch / "hosts").write_text("\n".join(lines) + "\n")
    (scratch / "resolv.conf").write_text("")
    found: list[Host] = []
    try:
        _ip("netns", "add", mark)
        _ip("-n", mark, "link", "add", "switch", "type", "bridge")
        _ip("-n", mark, "link", "set", "switch", "up")
        for number, (name, space) in enumerate(zip(names, spaces, strict=True), 1):
            _ip("netns", "add", space)
            _ip("-n", mark, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", mark, "link", "set", f"port{number}", "master", "switch", "up")
            _ip("-n", space, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            found.append(Host(name, number, space, mark, scratch))
        yield found
    finally:
        for host in found:
            host.kill()
        for space in [*spaces, mark]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def torchrun(
    nodes: str,
    store: Host,
    *words: str,
    restarts: int = 0,
    conf: str = "",
    per_node: int = 1,
    flags: Sequence[str] = (),
) -> list[str]:
    """The command line of the front door on one of several hosts.

    Args:
        nodes: --nnodes.
        store: the host of the rendezvous.
        conf: --rdzv-conf.
        flags: more of torchrun's own.
    """
    agent = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", str(restarts)]
    agent += ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"{store.name}:{PORT}"]
    agent += ["--rdzv-conf", conf] if conf else []
    return [sys.executable, "-m", "torch.distributed.run", *agent, *flags, FRONT_DOOR, *words]


def wait_for(condition: Callable[[], bool], seconds: float, what: str, logs: Mapping[str, Path]) -> None:
    """Wait until it happens.

    Raises:
        AssertionError: it did not within so many seconds; with what the hosts said.
    """
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            said = "\n".join(f"--- {name}\n{log.read_text()[-30000:]}" for name, log in logs.items() if log.exists())
            pytest.fail(f"{what}: not within {seconds:.0f} s\n{said}")
        time.sleep(0.05)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
