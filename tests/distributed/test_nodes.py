"""Several machines: torchrun over network namespaces; hosts die, are cut off and come back."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.monitor import journal
from tests.distributed.launcher import options, run_command
from tests.support.netns import FRONT_DOOR, Host, hosts, missing, torchrun, wait_for

GUIDE = Path(__file__).resolve().parents[2] / "docs/howto/several-machines.md"
NO_SPACES = missing()
pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(NO_SPACES), reason=NO_SPACES)]

FLAGS: dict[str, Any] = {
    "data": "tests.support.user_code:tensors",
    "model": "tests.support.user_code:net",
    "set": "guard=off",  # the network counts its passes
    "exact": True,
    "epochs": 40,
}
FLAGS |= {"global_batch_size": 12, "batch_size": 2, "checkpoint_every": "5", "log_interval": 1, "trace_samples": True}
CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
ELASTIC: dict[str, Any] = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "OWN_PAUSE": "0.1",
}  # without the first, torch 2.13 lets nobody join
SECONDS = 150
TORCHRUN = f"{sys.executable} -m torch.distributed.run"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process, in peace."""
    here = tmp_path_factory.mktemp("undisturbed")
    done = run_command([sys.executable, FRONT_DOOR, *options(FLAGS | {"multi_gpu": "none", "save_dir": "run"})], here)
    assert done.returncode == 0, done.stderr
    return here / "run"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(["node1", "node2", "node3"], tmp_path) as found:
        yield found


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(["node1", "node2"], tmp_path) as found:
        yield found


class Job:
    """One job on several hosts, watched through the journal of its folder."""

    def __init__(self, nodes: str, machines: list[Host], run: Path, **flags: Any) -> None:
        self.nodes, self.machines, self.run = nodes, machines, run
        self.words = options(FLAGS | {"save_dir": str(run)} | flags)

    def start(self, host: Host, *, restarts: int = 5) -> "subprocess.Popen[bytes]":
        store = self.machines[0]
        return host.start(torchrun(self.nodes, store, *self.words, restarts=restarts, conf=CONF), **ELASTIC)

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.run / "journal.jsonl"
        return [event for event in journal.read_events(file) if event["event"] == kind] if file.exists() else []

    def until(self, what: str, holds: Any) -> None:
        wait_for(holds, SECONDS, what, {host.name: host.log() for host in self.machines})

    def until_steps(self, more: int) -> None:
        """So many more steps of this attempt."""
        before = len(self.events("train"))
        self.until(f"{more} steps", lambda: len(self.events("train")) >= before + more)

    def recovered(self, what: str, workers: int, since: float) -> None:
        """The next step is done, on so many workers."""

        def back() -> bool:
            starts = self.events("start")
            late = [event for event in self.events("recovery") if event["time"] > since]
            return bool(late) and starts[-1]["world_size"] == workers

        self.until(f"{what}: {workers} workers at work", back)
        found = self.events("recovery")[-1]
        print(f"{what}: next step {found['time'] - since:.1f} s later, {found['lost_steps']} steps done again")

    def same_as(self, other: Path) -> None:
        """Steps, samples of each step and the last bit."""
        here, there = (json.loads((run / "summary.json").read_text()) for run in (self.run, other))
        assert (here["status"], here["steps"], here["samples"]) == ("completed", there["steps"], there["samples"])
        assert here["fingerprint"] == there["fingerprint"]
        assert samples(self.run) == samples(other)


def samples(run: Path) -> dict[int, list[int]]:
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return {line["step"]: sorted(line["samples"]) for line in lines}


def test_hosts_die_are_cut_off_and_come_back(
    three: list[Host], tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest goes on from the last checkpoint, and whoever comes back is taken in; the weights are those of peace."""
    job = Job("1:3", three, tmp_path / "run", hang_timeout=10)
    agents = [job.start(host) for host in three]
    job.until("all three at work", lambda: job.events("train") and job.events("start")[-1]["world_size"] == 3)
    with capsys.disabled():
        job.until_steps(12)
        since = time.time()
        three[2].kill()
        job.recovered("a host was killed", 2, since)
        since = time.time()
        agents[2] = job.start(three[2])
        job.recovered("it came back", 3, since)
        job.until_steps(7)
        since = time.time()
        three[1].cut_off()
        job.recovered("a host was cut off (--hang-timeout 10)", 2, since)
        since = time.time()
        three[1].reconnect()
        job.recovered("it was connected again", 3, since)
    assert [agent.wait(SECONDS) for agent in agents] == [0, 0, 0]
    job.same_as(undisturbed)
    causes = [event["cause"] for event in job.events("recovery")]
    assert re.match(r"rank (0, )?2 ended without an error message", causes[0]), (
        "a busy machine may not hear rank 0 in time"
    )
    assert any("no progress for" in cause for cause in causes)
    assert job.events("start")[0]["hosts"] == ["node1", "node2", "node3"]
    attempts = [re.findall(r"attempt (\d+)", fault["action"]) for fault in job.events("fault")]
    assert [int(number) for [number] in attempts] == list(range(2, len(attempts) + 2)), "counted across all agents"


def test_rank_0_is_cut_off_and_has_ended_before_another_takes_its_place(two: list[Host], tmp_path: Path) -> None:
    """Nobody reaches it, and the store is on the other node; both write into one folder, but never at once."""
    job = Job("1:2", two[::-1], tmp_path / "run", hang_timeout=5)
    for host in job.machines:
        job.start(host)
    job.until("both at work", lambda: job.events("train") and job.events("start")[-1]["world_size"] == 2)
    job.until_steps(7)
    since = time.time()
    two[0].cut_off()
    job.recovered("rank 0 was cut off", 1, since)
    before, after = job.events("start")[-2:]
    assert (before["host"], after["host"]) == ("node1", "node2")
    assert before["time"] < job.events("end")[-1]["time"] < after["time"]
    assert job.events("recovery")[-1]["cause"].startswith("no progress for")


def test_disks_of_their_own_and_rank_0_on_a_node_without_the_checkpoints(
    three: list[Host], tmp_path: Path, undisturbed: Path
) -> None:
    """Each host has its own working directory; ranks go by the hosts' names, so node1 takes rank 0 from node2."""
    first = Job("2", three[1:], three[1].folder / "run")
    first.words[first.words.index("--save-dir") + 1] = "run"
    agents = [first.start(host, restarts=0) for host in three[1:]]
    first.until_steps(12)
    agents[0].send_signal(signal.SIGTERM)
    assert [agent.wait(SECONDS) for agent in agents] == [1, 1], "torchrun's own code"
    assert not (three[2].folder / "run" / "checkpoints").exists()
    again = Job("2", three[:2], three[0].folder / "run")
    again.words = first.words
    agents = [again.start(host, restarts=0) for host in three[:2]]
    assert [agent.wait(SECONDS) for agent in agents] == [0, 0], three[0].log().read_text()
    resumed = again.events("resume")[0]["step"]
    assert resumed == json.loads((three[1].folder / "run" / "summary.json").read_text())["steps"]
    here = json.loads((again.run / "summary.json").read_text())
    there = json.loads((undisturbed / "summary.json").read_text())
    assert (here["steps"], here["fingerprint"]) == (there["steps"], there["fingerprint"])
    assert here["best"] == there["best"]
    assert torch.load(again.run / "best.pt", weights_only=True)["metrics"] == here["best"]
    assert samples(again.run).keys() == set(range(resumed + 1, here["steps"] + 1))


def test_one_of_several_agents_is_stopped_and_the_others_go_on(
    two: list[Host], tmp_path: Path, undisturbed: Path
) -> None:
    """A scheduler takes one machine away; nothing is lost, not one step is done twice."""
    job = Job("1:2", two, tmp_path / "run")
    agents = [job.start(host) for host in two]
    job.until("both at work", lambda: job.events("train") and job.events("start")[-1]["world_size"] == 2)
    job.until_steps(7)
    since = time.time()
    agents[1].send_signal(signal.SIGTERM)
    job.recovered("one was stopped", 1, since)
    assert [agent.wait(SECONDS) for agent in agents] == [0, 1]
    job.same_as(undisturbed)
    assert [event["lost_steps"] for event in job.events("recovery")] == [0]


def test_a_sharded_run_goes_on_from_the_rows_that_a_lost_host_wrote(
    three: list[Host], tmp_path: Path, undisturbed: Path
) -> None:
    """All hosts write into one folder; two of them read what three have written."""
    job = Job("1:3", three, tmp_path / "run", hang_timeout=10, multi_gpu="fsdp")
    job.words.remove("--exact")
    agents = [job.start(host) for host in three]
    job.until("all three at work", lambda: job.events("train") and job.events("start")[-1]["world_size"] == 3)
    job.until_steps(12)
    since = time.time()
    three[2].kill()
    job.recovered("a host was killed", 2, since)
    assert [agent.wait(SECONDS) for agent in agents[:2]] == [0, 0], three[0].log().read_text()
    assert job.events("resume")[-1]["from_world_size"] == 3
    assert (max((job.run / "checkpoints").iterdir()) / "rank_1.safetensors").exists()
    assert samples(job.run) == samples(undisturbed)
    here, there = (json.loads((run / "summary.json").read_text())["final"] for run in (job.run, undisturbed))
    assert here["val_loss"] == pytest.approx(there["val_loss"], rel=1e-4)


def test_the_node_with_other_data_is_named_once(two: list[Host], tmp_path: Path) -> None:
    for host, noise in zip(two, ("0.1", "0.2"), strict=True):
        code = "import torch; from torch.utils.data import TensorDataset\n"
        code += f"def data(split): return TensorDataset(torch.arange(80.0).view(20, 4) * {noise}, torch.arange(20) % 2)"
        (host.folder / "mine.py").write_text(code)
    job = Job("2", two, tmp_path / "run", data="mine:data")
    agents = [job.start(host, restarts=0) for host in two]
    assert [agent.wait(SECONDS) for agent in agents] == [1, 1]
    said = [line for host in two for line in host.log().read_text().splitlines() if line.startswith(("error:", "rank"))]
    assert said == ["error: --data mine:data: node2 (rank 1) and the others see different data: other contents"]
    assert not job.run.exists()


def of_the_guide() -> list[str]:
    """The commands of the guide that it says are run here: fixed, elastic, doctor."""
    return re.findall(
        r"run by tests/distributed/test_nodes.py[^>]*-->\n```bash\n(.*?)^```",
        GUIDE.read_text(),
        re.MULTILINE | re.DOTALL,
    )


def test_the_guides_commands_run(two: list[Host], tmp_path: Path) -> None:
    """As they stand there, but for the number of processes on a node, their length and where they save."""
    assert len(of_the_guide()) == 3
    for number, command in enumerate(of_the_guide()):
        assert f"--rdzv-conf={CONF}" in command or number != 1, "what is measured here is what is recommended"
        here = command.replace("--nproc-per-node=8", "--nproc-per-node=1").replace("torchrun", TORCHRUN)
        here = here.replace("main_multi_gpu.py", FRONT_DOOR).replace("runs/digits", f"{tmp_path}/run{number}")
        here = here.rstrip() + ("" if "doctor" in here else " --max-steps 4 --quiet")
        agents = [host.start(["bash", "-c", here]) for host in two]
        codes = [agent.wait(SECONDS) for agent in agents]
        assert codes == [0, 0], f"{here}\n{two[0].log().read_text()[-4000:]}"
        if "doctor" not in here:
            summary = json.loads((tmp_path / f"run{number}" / "summary.json").read_text())
            assert (summary["steps"], summary["world_size"]) == (4, 2)
    assert "the same on 2 nodes" in two[0].log().read_text()
