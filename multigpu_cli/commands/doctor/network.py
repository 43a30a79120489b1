"""doctor under torchrun: versions, data and addresses of a job's nodes, and the connections between them."""

import errno
import fcntl
import json
import os
import platform
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import metadata
from ipaddress import IPv4Address
from itertools import permutations
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, NamedTuple, Self

import torch
from torch.distributed import Store

from multigpu_cli.commands.doctor.system import Finding, warn_if
from multigpu_cli.config.schema import Config
from multigpu_cli.data.fingerprint import compute_fingerprint
from multigpu_cli.data.load import open_data
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.run.request.checks import group_ranks

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_PATIENCE = 3.0  # seconds for a connection; after that its packets count as dropped
_PINGS = 20
_BULK = 8 * 2**20  # bytes
_CLOSED = 1  # a port on which nobody listens: a machine that is up refuses it


class ConnectionResult(NamedTuple):
    """The result of an attempt to connect."""

    outcome: str  # ok, refused, dropped, alive (dropped, but another port of the same machine answers) or unreachable
    latency: float | None = None  # seconds of a round trip, None without a connection
    rate: float | None = None  # bytes a second, None where it was not measured


def list_interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def choose_address(
    variable: str, wanted: str | None, addresses: Mapping[str, str], resolved: str | None, *, alone: bool = False
) -> tuple[str, str]:
    """The address that a backend would give to the other nodes, and what is wrong with it.

    The variable is GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME with its prefixes, =exact and ^excluded names. Where it is
    not set, gloo takes the `resolved` address of this machine's host name. A machine that is `alone` has no other
    nodes, which could not reach the loopback.
    """
    known = ", ".join(f"{name} ({address})" for name, address in addresses.items())
    if wanted:
        matching = [address for name, address in addresses.items() if _matches_interface(variable, wanted, name)]
        if not matching:
            return "", f"{variable}={wanted} is no interface with an address here; there are {known}"
        address, loopback = matching[0], f"{variable}={wanted} is the loopback"
    elif resolved is None:
        return "", f"this machine's host name has no address, and {variable} names no interface; there are {known}"
    else:
        address, loopback = resolved, f"this machine's host name resolves to {resolved}"
    cut_off = IPv4Address(address).is_loopback and not alone
    return address, f"{loopback}, which no other node reaches; there are {known}" if cut_off else ""


def _matches_interface(variable: str, wanted: str, name: str) -> bool:
    names = wanted.lstrip("^=").split(",")
    if variable.startswith("GLOO") or wanted.startswith("="):
        return name in names
    return any(name.startswith(word) for word in names) != wanted.startswith("^")


class Listener(ThreadingTCPServer):
    """Answers probes on one address, at a port that the system chooses, as it does for a backend's sockets."""

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _Answer)
        self.daemon_threads = True  # a peer that falls silent holds up neither the others nor the end
        self.port = int(self.server_address[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), name="listener", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Answer(BaseRequestHandler):
    def handle(self) -> None:
        with suppress(OSError):  # the probing node may lose the connection
            while kind := self.request.recv(1):
                left = _BULK if kind == b"b" else 0
                while left > 0 and (piece := self.request.recv(min(left, 2**20))):
                    left -= len(piece)
                self.request.sendall(kind)


def probe_port(
    address: str, port: int, measure: Callable[[socket.socket], ConnectionResult] = lambda _: ConnectionResult("ok")
) -> ConnectionResult:
    """Connect to a port; to that of another program without sending anything."""
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE) as wire:
            return measure(wire)
    except ConnectionRefusedError:
        return ConnectionResult("refused")
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM):
            return ConnectionResult("unreachable")
    alive = port != _CLOSED and probe_port(address, _CLOSED).outcome == "refused"
    return ConnectionResult("alive" if alive else "dropped")


def probe_connection(address: str, port: int, *, speed: bool = False) -> ConnectionResult:
    """Connect to a listener and measure the connection, its bytes per second only where asked for."""

    def measure(wire: socket.socket) -> ConnectionResult:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.settimeout(60)
        latency = statistics.median(_time_exchange(wire, b"p") for _ in range(_PINGS))
        return ConnectionResult("ok", latency, _BULK / _time_exchange(wire, b"b" + bytes(_BULK)) if speed else None)

    return probe_port(address, port, measure)


def _time_exchange(wire: socket.socket, message: bytes) -> float:
    began = time.perf_counter()
    wire.sendall(message)
    if not wire.recv(1):
        raise ConnectionResetError
    return time.perf_counter() - began


_START = 60.0  # seconds for rank 0 to load torch
_MEANING = {
    "refused": "refused: a firewall rejects it, or the address is another machine's",
    "alive": "no answer, but the machine answers on another port: a firewall drops these ports",
    "dropped": "no answer at all: a firewall drops everything, the link is down, or the address is of another network",
    "unreachable": "unreachable: no route, or the link is down",
}
_FIX = {
    "refused": "open all TCP ports between the nodes",
    "alive": "open all TCP ports between the nodes: iptables -I INPUT -s ADDRESS -j ACCEPT",
    "dropped": "ping ADDRESS; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME for another interface",
    "unreachable": "ip route get ADDRESS; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME for another interface",
}


def check_nodes(world: World, config: Config, environ: Mapping[str, str], here: Sequence[Finding]) -> list[Finding]:
    """Findings about the nodes and the connections between them; the same on every rank."""
    own = gather_node_facts(world, config, environ, here) if world.local_rank == 0 else {}
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(own["address"])) if own.get("address") else None
        store = _get_store(world)  # the launcher's, which needs no process group
        if own:
            store.set(f"facts-{world.rank}", json.dumps(own))
        nodes = [json.loads(store.get(f"facts-{rank}")) for rank in leader_ranks(world)]
        return list(judge_nodes(nodes, probe_connections(world, nodes, listener)))


def check_store_connection(launch_env: LaunchEnv) -> Finding | None:
    """Whether rank 0's store can be reached: torchrun's agents have connected, but the store has another port."""
    until = time.monotonic() + _START
    while (way := probe_port(launch_env.address, launch_env.port)).outcome == "refused":
        if time.monotonic() > until or launch_env.rank == 0:  # rank 0 itself may be the one that will listen
            break
        time.sleep(0.5)
    if way.outcome in ("ok", "refused"):
        return None
    evidence = f"to rank 0's store ({launch_env.address}:{launch_env.port}): {_MEANING[way.outcome]}"
    fix = _FIX[way.outcome].replace("ADDRESS", launch_env.address)
    return Finding(f"from {os.uname().nodename}", "fail", evidence, fix)


def gather_node_facts(
    world: World, config: Config, environ: Mapping[str, str], here: Sequence[Finding]
) -> dict[str, Any]:
    """The facts about one node, as plain values, with the warnings and failures found there."""
    variable = "NCCL_SOCKET_IFNAME" if world.device.type == "cuda" else "GLOO_SOCKET_IFNAME"
    resolved = None
    with suppress(OSError):
        resolved = socket.gethostbyname(socket.gethostname())
    interfaces, alone = list_interfaces(), len(leader_ranks(world)) == 1
    wanted = environ.get(variable)
    address, trouble = choose_address(variable, wanted, interfaces, resolved, alone=alone)
    return {
        "host": os.uname().nodename,
        "rank": world.rank,
        "versions": list_versions(),
        "address": address,
        "trouble": trouble,
        "interfaces": list(interfaces),
        "wrong": [vars(finding) for finding in here if finding.verdict in ("warn", "fail")],
        "data": _fingerprint_data(config) if any(key.startswith("data") for key in config.explicit) else None,
    }


def list_versions() -> dict[str, str]:
    """Versions that must be the same on all nodes."""
    try:
        own = metadata.version("multigpu-cli")
    except metadata.PackageNotFoundError:
        own = f"not installed, {sys.path[0]}"
    cuda = torch.version.cuda or "none"
    return {"torch": torch.__version__, "python": platform.python_version(), "CUDA": cuda, "multigpu": own}


def _fingerprint_data(config: Config) -> dict[str, Any]:
    seed = config.reproducibility.seed
    try:
        exact, sums = compute_fingerprint(open_data(config), seed)
    except RequestError as error:
        return {"error": str(error), "exact": [], "sums": []}
    return {"error": "", "exact": exact, "sums": sums}


def _get_store(world: World) -> Store:
    assert world.store is not None, "a launcher has started this process"
    return world.store


def leader_ranks(world: World) -> list[int]:
    """The first rank of each node."""
    return [rank for rank, node in enumerate(world.agent_ids) if node not in world.agent_ids[:rank]]


def probe_connections(
    world: World, nodes: Sequence[Mapping[str, Any]], listener: Listener | None
) -> dict[str, ConnectionResult]:
    """Each node connects to each other, one pair after the other, so that pairs do not share the network.

    The results are by "RANK-RANK" of the nodes' first ranks; there is none for a node without an address.
    """
    store = _get_store(world)
    if listener is not None:
        store.set(f"port-{world.rank}", str(listener.port))
    ways = {}
    for one, other in permutations([node for node in nodes if node["address"]], 2):
        name = f"{one['rank']}-{other['rank']}"
        if world.rank == one["rank"]:
            port = int(store.get(f"port-{other['rank']}"))
            first = one["rank"] < other["rank"]
            store.set(f"reach-{name}", json.dumps(probe_connection(other["address"], port, speed=first)))
        ways[name] = ConnectionResult(*json.loads(store.get(f"reach-{name}")))
    return ways


def judge_nodes(nodes: Sequence[Mapping[str, Any]], ways: Mapping[str, ConnectionResult]) -> Iterator[Finding]:
    """Findings from the facts and the connections of all nodes."""
    yield from _compare_versions(nodes)
    yield from _compare_data(nodes)
    for node in nodes:
        if node["trouble"]:
            fix = f"GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, on {node['host']}: one of {', '.join(node['interfaces'])}"
            yield Finding(f"interface of {node['host']}", "fail", node["trouble"], fix)
    yield from _judge_connections(nodes, ways)
    for node in nodes[1:]:
        for wrong in node["wrong"]:
            yield Finding(**wrong | {"name": f"{node['host']}: {wrong['name']}"})


def _compare_versions(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    usual = nodes[0]["versions"]
    if all(node["versions"] == usual for node in nodes):
        listed = ", ".join(f"{name} {version}" for name, version in usual.items())
        yield Finding("versions of all", "ok", f"{pluralize(len(nodes), 'node')}: {listed}")
    for name in usual:
        if any(node["versions"][name] != usual[name] for node in nodes):
            listed = ", ".join(f"{node['host']} {node['versions'][name]}" for node in nodes)
            yield Finding(f"{name} versions", "fail", listed, f"the same {name} on every node")


def _compare_data(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    if nodes[0]["data"] is None:
        yield Finding("data", "not checked", "--data and --data-dir say which")
        return
    for node in nodes:
        if node["data"]["error"]:
            yield Finding(f"data of {node['host']}", "fail", node["data"]["error"])
    whole = [node for node in nodes if not node["data"]["error"]]
    groups = group_ranks([node["data"]["exact"] for node in whole], [node["data"]["sums"] for node in whole])
    if len(set(groups)) > 1:
        usual = statistics.mode(groups)
        odd = [node["host"] for node, group in zip(whole, groups, strict=True) if group != usual]
        yield Finding("data", "fail", f"other data on {', '.join(odd)}", "the same files on every node")
    elif len(whole) == len(nodes):
        yield Finding("data", "ok", f"the same on {pluralize(len(nodes), 'node')}")


def _judge_connections(nodes: Sequence[Mapping[str, Any]], ways: Mapping[str, ConnectionResult]) -> Iterator[Finding]:
    pairs = {}
    for one, other in permutations(nodes, 2):
        way = ways.get(f"{one['rank']}-{other['rank']}")
        if way and way.outcome != "ok":
            address = other["address"]
            evidence = f"to {other['host']} ({address}): {_MEANING[way.outcome]}"
            yield Finding(f"from {one['host']}", "fail", evidence, _FIX[way.outcome].replace("ADDRESS", address))
        elif way and way.rate and one["rank"] < other["rank"]:
            pairs[f"{one['host']}-{other['host']}"] = (way.latency or 0.0, way.rate)
    if not pairs:
        return
    latency, rate = (statistics.median(column) for column in zip(*pairs.values(), strict=True))
    slow = {name for name, (seconds, speed) in pairs.items() if seconds > 5 * latency or 2 * speed < rate}
    lines = [
        f"{name} {1e3 * seconds:.2f} ms there and back, {8 * speed / 1e6:.4g} Mbit/s{', slow' if name in slow else ''}"
        for name, (seconds, speed) in pairs.items()
    ]
    numbers = {name: {"latency": seconds, "bytes_per_second": speed} for name, (seconds, speed) in pairs.items()}
    fix = "the link of a slow pair: ethtool INTERFACE, another interface"
    yield warn_if(bool(slow), "between nodes", "\n".join(lines), fix, numbers)


def agree_on_exit_code(world: World, code: int) -> int:
    """Rank 0's exit code on all ranks; rank 0 may host the store, so it leaves last."""
    store = _get_store(world)
    if world.is_main:
        store.set("code", str(code))
        for rank in range(1, world.size):
            store.get(f"bye-{rank}")
        return code
    agreed = int(store.get("code"))
    store.set(f"bye-{world.rank}", "")
    return agreed
