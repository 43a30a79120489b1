import os
import socket
import time
from itertools import count
from pathlib import Path

import pytest

from multigpu_cli.commands.doctor import system
from multigpu_cli.commands.doctor.system import (
    check_cores,
    check_disk,
    check_host_name,
    check_open_files,
    check_ports,
    check_reverse_lookups,
    check_shared_memory,
    check_system,
)


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    names = [finding.name for finding in check_system(tmp_path / "not/yet", 4, 2)]
    limits, net = ["shared memory", "open files"], ["ports", "host name", "names of connections"]
    assert names == [*limits, *net, f"disk ({tmp_path}/not/yet)", "CPU cores"]
    assert list(tmp_path.iterdir()) == []


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_shared_memory(tmp_path / "nothing").verdict == "not checked"
    usage = type("Usage", (), {"total": 64 * 2**20, "free": 60 * 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    found = check_shared_memory(tmp_path)
    assert (found.verdict, found.numbers) == ("warn", {"free_bytes": 60 * 2**20})
    assert "--shm-size" in found.fix


def test_open_files() -> None:
    assert check_open_files((1024, 524288)).fix == "ulimit -n 65536"
    assert check_open_files((1024, 4096)).fix == "ulimit -n 4096"
    assert check_open_files((65536, 65536)).verdict == check_open_files((-1, -1)).verdict == "ok"


def test_a_port_that_is_taken_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert check_ports(taken).verdict == "warn"
        assert "--standalone" in check_ports(taken).fix
    assert check_ports(taken).verdict == "ok"


def test_a_name_without_an_address_is_noticed() -> None:
    assert check_host_name("localhost").verdict == "ok"
    assert "/etc/hosts" in check_host_name("no-such-host.invalid").fix


def test_a_name_server_that_does_not_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(address: tuple[str, int, int, int], flags: int) -> None:
        time.sleep(0.7 if next(turn) == 20 else 0)
        raise socket.gaierror

    turn = count()
    monkeypatch.setattr(socket, "getnameinfo", asked)
    found = check_reverse_lookups(system._time_lookups())
    assert (found.verdict, next(turn)) == ("warn", 32)
    assert found.evidence.startswith("the slowest of 32 look-ups of ::ffff:127.0.0.1 took 7")
    assert "/etc/hosts" in found.fix
    assert check_reverse_lookups([0.002, 0.1]).verdict == "ok"


def test_the_disk_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_disk(tmp_path / "runs")
    assert found.numbers is not None
    assert found.numbers["bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(system, "_measure_writes", lambda _: (5e6, 0.1))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**40}))
    assert "--checkpoint-every" in check_disk(tmp_path).fix
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**20}))
    assert check_disk(tmp_path).verdict == "fail"
    monkeypatch.undo()
    if os.getuid():
        tmp_path.chmod(0o500)
        assert check_disk(tmp_path).verdict == "fail"


def test_cores() -> None:
    assert check_cores(16, 8).verdict == "ok"
    assert check_cores(15, 8).verdict == "warn"
    assert "1.88 for each of 8" in check_cores(15, 8).evidence
