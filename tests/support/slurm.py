"""A SLURM of two nodes on this machine: Debian's slurm-wlm and munge, with configuration, ports and keys of their own.

Its GPUs are devices that every Linux has: SLURM counts them, and no program finds one.

The daemons live in namespaces of their own: there /etc/hosts knows both nodes, and what they started ends with them.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm.sbatch"
_DAEMONS = """cd "$1" && mount --bind hosts /etc/hosts || exit
munged --foreground --force --socket="$PWD/munge" --key-file="$PWD/key" --pid-file="$PWD/munged.pid" \
    --seed-file="$PWD/seed" --log-file="$PWD/munged.log" &
until [ -S munge ]; do sleep 0.1; done
slurmctld -D &
slurmd -D -N n1 &
slurmd -D -N n2 &
wait"""
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
KillWait=30
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:2 State=UNKNOWN
PartitionName=usual Nodes=n[1-2] Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=patient Nodes=n[1-2] MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE PriorityTier=10
"""


def missing() -> str:
    """Why there can be no SLURM here; "" where there can."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    needed = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
    if lacking := [name for name in needed if not shutil.which(name)]:
        return f"no {', '.join(lacking)} (apt install slurm-wlm munge)"
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


class Cluster:
    """Takes jobs as long as its context lasts; each writes its output into `folder`/JOB.out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}
        self.environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MULTIGPU_PER_NODE": "1"}
        self.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def ask(self, *command: str, **environ: str) -> str:
        """One of SLURM's commands; what it printed."""
        done = subprocess.run(command, env=self.environ | environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str, flags: tuple[str, ...] = (), **environ: str) -> str:
        """The number of a new job of deploy/slurm.sbatch on both nodes, with these words for the trainer."""
        small = ("--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={self.folder}/%j.out")
        return self.ask("sbatch", "--parsable", *small, *flags, str(SCRIPT), *words, **environ)

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job."""
        pairs = (word.partition("=") for word in self.ask("scontrol", "--oneliner", "show", "job", number).split())
        return {name: value for name, _, value in pairs}

    def output(self, number: str) -> str:
        file = self.folder / f"{number}.out"
        return file.read_text() if file.exists() else ""

    def wait(self, number: str, seconds: float, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states; what scontrol then says of it."""
        self.wait_for(lambda: self.job(number)["JobState"] in states, seconds, f"job {number} {states}", number)
        return self.job(number)

    def wait_for(self, happened: Callable[[], bool], seconds: float, what: str, number: str = "") -> None:
        until = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > until:
                logs = [self.output(number), *(file.read_text()[-3000:] for file in self.folder.glob("*.log"))]
                pytest.fail("\n---\n".join([f"{what}: not within {seconds:.0f} s", *logs]))
            time.sleep(0.2)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Two idle nodes, for as long as the context lasts."""
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, host=host, ports=_free_ports(3)))
    (folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{name}\n" for name in ("null", "zero")))
    (folder / "hosts").write_text(f"127.0.0.1 localhost {host} n1 n2\n")
    (folder / "key").touch(0o600)
    (folder / "key").write_bytes(os.urandom(128))
    found = Cluster(folder)
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with open(folder / "daemons.log", "wb") as log:
        daemons = subprocess.Popen(
            [*apart, "sh", "-c", _DAEMONS, "sh", str(folder)], env=found.environ, stdout=log, stderr=log
        )
    try:
        (folder / "state").mkdir()
        idle = ["sinfo", "--noheader", "--partition=usual", "--states=idle", "--format=%D"]
        answers = lambda: subprocess.run(idle, env=found.environ, capture_output=True, text=True).stdout  # noqa: E731
        found.wait_for(lambda: answers().strip() == "2", 60, "two idle nodes")
        yield found
    finally:
        daemons.send_signal(signal.SIGKILL)  # the kernel ends what is in its namespace
        daemons.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
