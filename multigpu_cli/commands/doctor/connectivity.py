"""Which nodes reach each other: interfaces, and real TCP connections; tells a firewall from a link that is down."""

import errno
import fcntl
import socket
import statistics
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Address
from typing import NamedTuple, Self

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_PATIENCE = 3.0  # seconds for a connection; after that its packets count as dropped
_PINGS = 20
_BULK = 8 * 2**20  # bytes
_CLOSED = 1  # a port on which nobody listens: a machine that is up refuses it


class ConnectionResult(NamedTuple):
    """The result of an attempt to connect.

    Attributes:
        outcome: ok, refused, dropped, alive (dropped, but another port of the same machine answers) or unreachable.
        latency: seconds of a round trip, None without a connection.
        rate: bytes a second, None where it was not measured.
    """

    outcome: str
    latency: float | None = None
    rate: float | None = None


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

    Args:
        variable: GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME with its prefixes, =exact and ^excluded names.
        wanted: its value.
        addresses: by interface.
        resolved: the address of this machine's host name; gloo takes it where the variable is not set.
        alone: there are no other nodes, which could not reach the loopback.
    """
    known = ", ".join(f"{name} ({address})" for name, address in addresses.items())
    if wanted:
        matching = [address for name, address in addresses.items() if _matches_interface(variable, wanted, name)]
        if not matching:
            return "", f"{variable}={wanted} is no interface with an address here; there are {known}"
        loopback = f"{variable}={wanted} is the loopback, which no other node reaches"
        return matching[0], loopback if _is_loopback(matching[0]) and not alone else ""
    if resolved is None:
        return "", f"this machine's host name has no address, and {variable} names no interface; there are {known}"
    loopback = f"this machine's host name resolves to {resolved}, which no other node reaches; there are {known}"
    return resolved, loopback if _is_loopback(resolved) and not alone else ""


def _matches_interface(variable: str, wanted: str, name: str) -> bool:
    names = wanted.lstrip("^=").split(",")
    if variable.startswith("GLOO") or wanted.startswith("="):
        return name in names
    return any(name.startswith(word) for word in names) != wanted.startswith("^")


def _is_loopback(address: str) -> bool:
    return IPv4Address(address).is_loopback


class Listener:
    """Answers probes on one address, at a port that the system chooses, as it does for a backend's sockets."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0))
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, name="listener", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # closed
                return
            with peer, suppress(OSError):  # the probing node may lose the connection
                _answer(peer)


def _answer(peer: socket.socket) -> None:
    while kind := peer.recv(1):
        left = _BULK if kind == b"b" else 0
        while left > 0 and (piece := peer.recv(min(left, 2**20))):
            left -= len(piece)
        peer.sendall(kind)


def probe_connection(address: str, port: int, *, speed: bool = False) -> ConnectionResult:
    """Connect to a listener and measure the connection.

    Args:
        speed: measure the bytes per second too.
    """
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE) as wire:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.settimeout(60)
            latency = statistics.median(_time_exchange(wire, b"p") for _ in range(_PINGS))
            rate = _BULK / _time_exchange(wire, b"b" + bytes(_BULK)) if speed else None
            return ConnectionResult("ok", latency, rate)
    except OSError as error:
        return _classify_failure(error, address, port)


def probe_port(address: str, port: int) -> ConnectionResult:
    """Connect to another program's port, without sending anything."""
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE):
            return ConnectionResult("ok")
    except OSError as error:
        return _classify_failure(error, address, port)


def _classify_failure(error: OSError, address: str, port: int) -> ConnectionResult:
    if isinstance(error, ConnectionRefusedError):
        return ConnectionResult("refused")
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM):
        return ConnectionResult("unreachable")
    alive = port != _CLOSED and probe_port(address, _CLOSED).outcome == "refused"
    return ConnectionResult("alive" if alive else "dropped")


def _time_exchange(wire: socket.socket, message: bytes) -> float:
    began = time.perf_counter()
    wire.sendall(message)
    if not wire.recv(1):
        raise ConnectionResetError
    return time.perf_counter() - began
