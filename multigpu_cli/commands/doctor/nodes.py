"""doctor under torchrun: what the nodes of a job have in common, and what stands between them."""

import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import metadata
from itertools import combinations, permutations
from typing import Any

import torch

from multigpu_cli.commands.doctor import connectivity
from multigpu_cli.commands.doctor.connectivity import ConnectionResult, Listener
from multigpu_cli.commands.doctor.findings import Finding
from multigpu_cli.config.schema import Config
from multigpu_cli.data.fingerprint import compute_fingerprint
from multigpu_cli.data.load_data_source import load_data_source
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.run.rank_consistency import group_ranks
from multigpu_cli.runtime.launch_env import LaunchEnv
from multigpu_cli.runtime.world import World

_START = 60.0  # seconds for rank 0 to load torch
_MEANING = {
    "refused": "refused: a firewall that rejects, or another machine's address",
    "alive": "no answer, but the machine answers on another port: a firewall drops these ports",
    "dropped": "no answer at all: a firewall that drops everything, a link that is down, or an address of another net",
    "unreachable": "no way there: no route, or the link is down",
}
_FIX = {
    "refused": "open all TCP ports between the nodes",
    "alive": "open all TCP ports between the nodes: iptables -I INPUT -s ADDRESS -j ACCEPT",
    "dropped": "ping ADDRESS; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME for another interface",
    "unreachable": "ip route get ADDRESS; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME for another interface",
}


def check_nodes(world: World, config: Config, environ: Mapping[str, str], here: Sequence[Finding]) -> list[Finding]:
    """What the nodes have in common and what stands between them; the same on every rank.

    Args:
        here: what this node's own check found.
    """
    own = gather_node_facts(world, config, environ, here) if world.local_rank == 0 else {}
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(own["address"])) if own.get("address") else None
        nodes = exchange_facts(world, own)
        return list(judge_nodes(nodes, probe_connections(world, nodes, listener)))


def check_store_connection(launch_env: LaunchEnv) -> Finding | None:
    """The agents have met at the rendezvous; the workers' store listens at another port."""
    until = time.monotonic() + _START
    while (way := connectivity.probe_port(launch_env.address, launch_env.port)).outcome == "refused":
        if time.monotonic() > until or launch_env.rank == 0:  # rank 0 may be the one who will listen
            break
        time.sleep(0.5)
    if way.outcome in ("ok", "refused"):
        return None
    evidence = f"to rank 0's store ({launch_env.address}:{launch_env.port}): {_MEANING[way.outcome]}"
    return Finding(
        f"from {os.uname().nodename}", "fail", evidence, _FIX[way.outcome].replace("ADDRESS", launch_env.address)
    )


def gather_node_facts(
    world: World, config: Config, environ: Mapping[str, str], here: Sequence[Finding]
) -> dict[str, Any]:
    """What one node says of itself: plain values.

    Args:
        here: what its own check found; only what is wrong travels.
    """
    variable = "NCCL_SOCKET_IFNAME" if world.device.type == "cuda" else "GLOO_SOCKET_IFNAME"
    resolved = None
    with suppress(OSError):
        resolved = socket.gethostbyname(socket.gethostname())
    there = connectivity.list_interfaces()
    address, trouble = connectivity.choose_address(
        variable, environ.get(variable), there, resolved, alone=len(leader_ranks(world)) == 1
    )
    return {
        "host": os.uname().nodename,
        "rank": world.rank,
        "versions": list_versions(),
        "address": address,
        "trouble": trouble,
        "interfaces": list(there),
        "wrong": [finding.as_dict() for finding in here if finding.verdict in ("warn", "fail")],
        "data": _fingerprint_data(config) if any(key.startswith("data") for key in config.explicit) else None,
    }


def list_versions() -> dict[str, str]:
    """Of what must be alike on all nodes."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    versions["CUDA"] = torch.version.cuda or "none"
    try:
        versions["multigpu"] = metadata.version("multigpu-cli")
    except metadata.PackageNotFoundError:
        versions["multigpu"] = f"not installed, {sys.path[0]}"
    return versions


def _fingerprint_data(config: Config) -> dict[str, Any]:
    seed = config.reproducibility.seed
    try:
        exact, sums = compute_fingerprint(load_data_source(config.data, seed), seed)
    except RequestError as error:
        return {"error": str(error), "exact": [], "sums": []}
    return {"error": "", "exact": exact, "sums": sums}


def exchange_facts(world: World, own: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of all nodes, told over the launcher's store, for which no process group is needed."""
    assert world.store is not None
    if own:
        world.store.set(f"facts-{world.rank}", json.dumps(own))
    return [json.loads(world.store.get(f"facts-{rank}")) for rank in leader_ranks(world)]


def leader_ranks(world: World) -> list[int]:
    """The first rank of each node."""
    return [rank for rank, node in enumerate(world.agent_ids) if node not in world.agent_ids[:rank]]


def probe_connections(
    world: World, nodes: Sequence[Mapping[str, Any]], listener: Listener | None
) -> dict[str, ConnectionResult]:
    """Each node connects to each other, one pair after the other, so that they do not share the wire.

    Returns:
        By "RANK-RANK" of the nodes' first ranks; nothing for a node that has no address to offer.
    """
    store = world.store
    assert store is not None
    if listener is not None:
        store.set(f"port-{world.rank}", str(listener.port))
    ways = {}
    for one, other in permutations([node for node in nodes if node["address"]], 2):
        name = f"{one['rank']}-{other['rank']}"
        if world.rank == one["rank"]:
            port = int(store.get(f"port-{other['rank']}"))
            first = one["rank"] < other["rank"]
            store.set(f"reach-{name}", json.dumps(connectivity.probe_connection(other["address"], port, speed=first)))
        ways[name] = ConnectionResult(*json.loads(store.get(f"reach-{name}")))
    return ways


def judge_nodes(nodes: Sequence[Mapping[str, Any]], ways: Mapping[str, ConnectionResult]) -> Iterator[Finding]:
    """What the facts and the connections of all nodes say."""
    yield from _compare_nodes(nodes)
    yield from (
        Finding(f"interface of {node['host']}", "fail", node["trouble"], _suggest_interface(node))
        for node in nodes
        if node["trouble"]
    )
    yield from _judge_connections(nodes, ways)
    for node in nodes[1:]:
        for wrong in node["wrong"]:
            yield Finding(**wrong | {"name": f"{node['host']}: {wrong['name']}"})


def _suggest_interface(node: Mapping[str, Any]) -> str:
    return f"GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, on {node['host']}: one of {', '.join(node['interfaces'])}"


def _compare_nodes(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for what in nodes[0]["versions"]:
        by_host = {node["host"]: node["versions"][what] for node in nodes}
        if len(set(by_host.values())) > 1:
            text = ", ".join(f"{host} {version}" for host, version in by_host.items())
            yield Finding(f"{what} versions", "fail", text, f"the same {what} on every node")
    if all(len({node["versions"][what] for node in nodes}) == 1 for what in nodes[0]["versions"]):
        same = ", ".join(f"{name} {version}" for name, version in nodes[0]["versions"].items())
        yield Finding("versions of all", "ok", f"{pluralize(len(nodes), 'node')}: {same}")
    if nodes[0]["data"] is None:
        yield Finding("data", "not checked", "--data and --data-dir say which")
        return
    broken = [node for node in nodes if node["data"]["error"]]
    for node in broken:
        yield Finding(f"data of {node['host']}", "fail", node["data"]["error"])
    whole = [node for node in nodes if not node["data"]["error"]]
    groups = group_ranks([node["data"]["exact"] for node in whole], [node["data"]["sums"] for node in whole])
    if len(set(groups)) > 1:
        usual = statistics.mode(groups)
        odd = [node["host"] for node, group in zip(whole, groups, strict=True) if group != usual]
        yield Finding("data", "fail", f"other data on {', '.join(odd)}", "the same files on every node")
    elif not broken:
        yield Finding("data", "ok", f"the same on {pluralize(len(nodes), 'node')}")


def _judge_connections(nodes: Sequence[Mapping[str, Any]], ways: Mapping[str, ConnectionResult]) -> Iterator[Finding]:
    if len(nodes) < 2:
        return
    host = {str(node["rank"]): node for node in nodes}
    for name, way in ways.items():
        one, other = (host[rank] for rank in name.split("-"))
        if way.outcome != "ok":
            address = other["address"]
            evidence = f"to {other['host']} ({address}): {_MEANING[way.outcome]}"
            yield Finding(f"from {one['host']}", "fail", evidence, _FIX[way.outcome].replace("ADDRESS", address))
    pairs = {
        f"{one['host']}-{other['host']}": (ways[name].latency or 0.0, ways[name].rate or 0.0)
        for one, other in combinations(nodes, 2)
        if (name := f"{one['rank']}-{other['rank']}") in ways and ways[name].rate
    }
    if not pairs:
        return
    latency, rate = (statistics.median(column) for column in zip(*pairs.values(), strict=True))
    slow = {name for name, (seconds, speed) in pairs.items() if seconds > 5 * latency or 2 * speed < rate}
    lines = [
        f"{name} {1e3 * seconds:.2f} ms there and back, {8 * speed / 1e6:.4g} Mbit/s{', slow' if name in slow else ''}"
        for name, (seconds, speed) in pairs.items()
    ]
    numbers = {name: {"latency": seconds, "bytes_per_second": speed} for name, (seconds, speed) in pairs.items()}
    fix = "the link of a slow pair: ethtool INTERFACE, another interface" if slow else ""
    yield Finding("between nodes", "warn" if slow else "ok", "\n".join(lines), fix, numbers)


def agree_on_exit_code(world: World, code: int) -> int:
    """One exit code for all: rank 0's; it may host the store, so it leaves last."""
    store = world.store
    assert store is not None
    if world.is_main:
        store.set("code", str(code))
        for rank in range(1, world.size):
            store.get(f"bye-{rank}")
        return code
    agreed = int(store.get("code"))
    store.set(f"bye-{world.rank}", "")
    return agreed
