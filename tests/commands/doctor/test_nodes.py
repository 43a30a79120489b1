"""What the facts of several nodes say; how they come by is in tests/distributed/test_doctor_nodes.py."""

from collections.abc import Mapping
from typing import Any

from multigpu_cli.commands.doctor.network import ConnectionResult, judge_nodes, list_versions
from multigpu_cli.commands.doctor.system import Finding


def node(rank: int, **changed: Any) -> dict[str, Any]:
    said = {"host": f"node{rank}", "rank": rank, "versions": {"torch": "2.13", "python": "3.12"}, "trouble": ""}
    data = {"error": "", "exact": [1, 2, 3, 4], "sums": [1.0, 2.0]}
    said |= {"address": f"10.0.0.{rank}", "interfaces": ["lo", "eth0"], "wrong": [], "data": data}
    return said | changed


GOOD = ConnectionResult("ok", 1e-4, 1e9)
WAYS = {f"{one}-{other}": GOOD for one in range(3) for other in range(3) if one != other}


def read_findings(ways: Mapping[str, ConnectionResult] = WAYS, **changed: Any) -> dict[str, Finding]:
    """The findings by name, where node 2 is another."""
    return {each.name: each for each in judge_nodes([node(0), node(1), node(2, **changed)], ways)}


def test_nodes_that_are_alike_and_reach_each_other_are_fine() -> None:
    found = read_findings()
    assert {each.verdict for each in found.values()} == {"ok"}
    assert found["versions of all"].evidence == "3 nodes: torch 2.13, python 3.12"
    assert found["between nodes"].evidence.splitlines()[2] == "node1-node2 0.10 ms there and back, 8000 Mbit/s"


def test_other_versions_and_other_data_are_named() -> None:
    other = {"error": "", "exact": [1, 2, 3, 5], "sums": [1.0, 2.0]}
    found = read_findings(versions={"torch": "2.11", "python": "3.12"}, data=other)
    assert found["torch versions"].evidence == "node0 2.13, node1 2.13, node2 2.11"
    assert "python versions" not in found
    assert (found["data"].verdict, found["data"].evidence) == ("fail", "other data on node2")
    missing = read_findings(data={"error": "--data-dir: no such folder", "exact": [], "sums": []})
    assert missing["data of node2"].evidence == "--data-dir: no such folder"
    assert "data" not in missing, "nothing is said of the others"
    assert set(list_versions()) == {"torch", "python", "CUDA", "multigpu"}


def test_a_wrong_interface_and_a_nodes_own_trouble_are_named() -> None:
    wrong = vars(Finding("disk", "fail", "full", "free space"))
    found = read_findings(trouble="GLOO_SOCKET_IFNAME=eth7 is no interface", wrong=[wrong])
    assert "on node2: one of lo, eth0" in found["interface of node2"].fix
    assert (found["node2: disk"].verdict, found["node2: disk"].evidence) == ("fail", "full")


def test_each_way_that_is_closed_is_told_with_its_reason() -> None:
    closed = {"0-2": ConnectionResult("alive"), "1-2": ConnectionResult("dropped"), "2-1": ConnectionResult("refused")}
    found = list(judge_nodes([node(0), node(1), node(2)], WAYS | closed))
    said = {(each.name, each.evidence.partition(": ")[2].partition(",")[0]) for each in found if each.verdict == "fail"}
    assert said == {
        ("from node0", "no answer"),
        ("from node1", "no answer at all: a firewall drops everything"),
        ("from node2", "refused: a firewall rejects it"),
    }
    assert any("iptables -I INPUT -s 10.0.0.2" in each.fix for each in found)


def test_a_slow_pair_stands_out() -> None:
    found = read_findings(WAYS | {"0-1": ConnectionResult("ok", 1e-4, 1e8)})["between nodes"]
    assert found.verdict == "warn"
    assert "node0-node1 0.10 ms there and back, 800 Mbit/s, slow" in found.evidence
    assert found.numbers is not None
    assert found.numbers["node0-node1"]["bytes_per_second"] == 1e8
