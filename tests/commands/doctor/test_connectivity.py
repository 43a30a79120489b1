"""Interfaces and TCP probes; firewalls are in tests/distributed/test_doctor_nodes.py."""

import errno
import socket
import threading
from typing import Any

import pytest
import torch

from multigpu_cli.commands.doctor import network
from multigpu_cli.commands.doctor.network import (
    ConnectionResult,
    Listener,
    choose_address,
    gather_node_facts,
    list_interfaces,
    probe_connection,
    probe_port,
)
from multigpu_cli.config.schema import Config
from multigpu_cli.distributed.world import World

THERE = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}


@pytest.mark.parametrize(
    ("variable", "wanted", "address"),
    [
        ("GLOO_SOCKET_IFNAME", "ib0", "10.1.0.1"),
        ("NCCL_SOCKET_IFNAME", "ib", "10.1.0.1"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "10.0.0.1"),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", "10.1.0.1"),
        ("GLOO_SOCKET_IFNAME", None, "10.0.0.1"),
    ],
)
def test_an_interface_gives_its_address(variable: str, wanted: str | None, address: str) -> None:
    assert choose_address(variable, wanted, THERE, "10.0.0.1") == (address, "")


@pytest.mark.parametrize(
    ("wanted", "resolved", "said"),
    [
        ("eth7", "10.0.0.1", "GLOO_SOCKET_IFNAME=eth7 is no interface with an address here"),
        ("eth", "10.0.0.1", "GLOO_SOCKET_IFNAME=eth is no interface"),
        ("lo", "10.0.0.1", "GLOO_SOCKET_IFNAME=lo is the loopback"),
        (None, "127.0.1.1", "host name resolves to 127.0.1.1, which no other node reaches"),
        (None, None, "host name has no address, and GLOO_SOCKET_IFNAME names no interface"),
    ],
)
def test_one_that_no_other_node_can_use_is_told(wanted: str | None, resolved: str | None, said: str) -> None:
    trouble = choose_address("GLOO_SOCKET_IFNAME", wanted, THERE, resolved)[1]
    assert said in trouble
    assert "eth0 (10.0.0.1)" in trouble or "loopback" in trouble


def test_on_one_node_the_loopback_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what many a machine's own name stands for, and the workers of torchrun --standalone meet there."""
    assert choose_address("GLOO_SOCKET_IFNAME", "lo", THERE, "10.0.0.1", alone=True) == ("127.0.0.1", "")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    for nodes, trouble in (("aa", False), ("ab", True)):
        told = gather_node_facts(World(torch.device("cpu"), size=2, agent_ids=tuple(nodes)), Config(), {}, [])
        assert bool(told["trouble"]) is trouble


def test_this_machine_has_a_loopback() -> None:
    assert list_interfaces()["lo"] == "127.0.0.1"


def test_a_listener_is_reached_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_BULK", 2**20)
    with Listener("127.0.0.1") as listener:
        way = probe_connection("127.0.0.1", listener.port, speed=True)
        assert way.outcome == "ok"
        assert 0 < (way.latency or 0) < 0.1
        assert (way.rate or 0) > 1e6
        assert probe_connection("127.0.0.1", listener.port).rate is None, "and again"
        assert probe_port("127.0.0.1", listener.port) == ConnectionResult("ok")
    assert threading.active_count() < 10


def test_a_peer_that_falls_silent_holds_up_neither_others_nor_the_end() -> None:
    """As one does whose packets a firewall drops once it is connected."""
    found = []

    def listen(silent: socket.socket) -> None:
        with Listener("127.0.0.1") as listener:
            silent.connect(("127.0.0.1", listener.port))
            found.append(probe_connection("127.0.0.1", listener.port).outcome)
        found.append("ended")

    with socket.socket() as silent:
        thread = threading.Thread(target=listen, args=(silent,), daemon=True)
        thread.start()
        thread.join(10)
        assert found == ["ok", "ended"]


@pytest.mark.parametrize(
    ("error", "closed", "outcome"),
    [
        (ConnectionRefusedError(), None, "refused"),
        (TimeoutError(), ConnectionRefusedError(), "alive"),
        (TimeoutError(), TimeoutError(), "dropped"),
        (OSError(errno.EHOSTUNREACH, "no route"), None, "unreachable"),
    ],
)
def test_outcomes_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, error: OSError, closed: OSError | None, outcome: str
) -> None:
    def connect(place: tuple[str, int], **_: Any) -> socket.socket:
        raise error if place[1] == 4000 or closed is None else closed

    monkeypatch.setattr(socket, "create_connection", connect)
    assert probe_connection("10.0.0.9", 4000) == probe_port("10.0.0.9", 4000) == ConnectionResult(outcome)
