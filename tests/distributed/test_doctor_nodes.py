"""doctor under torchrun, over network namespaces: speeds, other data, firewalls, wrong interfaces."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.netns import Host, hosts, missing, torchrun

NO_SPACES = missing()
pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(NO_SPACES), reason=NO_SPACES)]
SECONDS = 150


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(["node1", "node2", "node3"], tmp_path) as found:
        yield found


def run_checks(machines: list[Host], *words: str, **environ: Any) -> tuple[list[int], str]:
    """Exit codes of the agents, and what the job said."""
    command = torchrun(str(len(machines)), machines[0], "doctor", "--save-dir", "run", *words)
    agents = [host.start(command, **{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | environ) for host in machines]
    codes = [agent.wait(SECONDS) for agent in agents]
    return codes, "\n".join(host.log().read_text() for host in machines)


def lines(said: str, name: str) -> list[str]:
    return [line for line in said.splitlines() if line[6:].startswith(name)]


def test_nodes_that_are_fit(three: list[Host]) -> None:
    shaped = ["rate", "40mbit", "burst", "64kb", "latency", "400ms"]
    three[0].inside("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shaped)
    codes, said = run_checks(three[:2], "--data", "digits")
    assert codes == [0, 0], said
    assert "2 nodes: torch" in lines(said, "versions of all")[0]
    assert lines(said, "data")[0].endswith("the same on 2 nodes")
    assert "sums are right" in said
    [pair] = lines(said, "between nodes")
    assert 20 < float(re.findall(r"node1-node2 .* there and back, ([\d.]+) Mbit/s", pair)[0]) < 60, "shaped to 40"


def test_a_firewall_other_data_and_a_node_out_of_reach(three: list[Host]) -> None:
    if not shutil.which("iptables"):
        pytest.skip("a firewall needs iptables (apt install iptables)")
    for host, peer, verdict in ((three[2], "10.77.0.2", "DROP"), (three[1], "10.77.0.1", "REJECT")):
        new = ["-p", "tcp", "--syn", "-s", peer, "--dport", "1024:65535"]
        host.inside("iptables", "-A", "INPUT", *new, "-j", verdict)
    three[2].inside("ip", "route", "add", "prohibit", "10.77.0.2/32")  # and no way back for what does arrive
    for host, start in zip(three, "001", strict=True):
        code = "import torch; from torch.utils.data import TensorDataset\n"
        code += f"def data(split): return TensorDataset(torch.arange(80.0).view(20, 4) + {start}, torch.arange(20) % 2)"
        (host.folder / "mine.py").write_text(code)
    codes, said = run_checks(three, "--data", "mine:data")
    assert codes == [1, 1, 1], "fail"
    assert "other data on node3" in lines(said, "data")[0]
    assert "to node2 (10.77.0.2): refused" in "".join(lines(said, "from node1"))
    assert "to node2 (10.77.0.2): unreachable" in "".join(lines(said, "from node3"))
    assert "to node3 (10.77.0.3): no answer" in "".join(lines(said, "from node2"))
    assert "not checked: the failures above come first" in said


def test_an_interface_that_is_not_there(three: list[Host]) -> None:
    codes, said = run_checks(three[:2], GLOO_SOCKET_IFNAME="eth7")
    assert codes == [1, 1]
    [line] = lines(said, "interface of node2")
    assert "GLOO_SOCKET_IFNAME=eth7 is no interface with an address here" in line
    assert "eth0 (10.77.0.2)" in line
