import os
import socket
import time
from itertools import count
from pathlib import Path

import pytest

from multigpu_cli.commands import doctor_system
from multigpu_cli.commands.doctor_system import (
    connection_names,
    cores_per_worker,
    disk,
    findings,
    host_name,
    open_files,
    ports,
    shared_memory,
)


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    names = [finding.name for finding in findings(tmp_path / "not/yet", 4, 2)]
    limits, net = ["shared memory", "open files"], ["ports", "host name", "names of connections"]
    assert names == [*limits, *net, f"disk ({tmp_path}/not/yet)", "CPU cores"]
    assert list(tmp_path.iterdir()) == []


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory(tmp_path / "nothing").verdict == "not checked"
    usage = type("Usage", (), {"total": 64 * 2**20, "free": 60 * 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    found = shared_memory(tmp_path)
    assert (found.verdict, found.numbers) == ("warn", {"free_bytes": 60 * 2**20})
    assert "--shm-size" in found.fix


def test_open_files() -> None:
    assert open_files((1024, 524288)).fix == "ulimit -n 65536"
    assert open_files((1024, 4096)).fix == "ulimit -n 4096"
    assert open_files((65536, 65536)).verdict == open_files((-1, -1)).verdict == "ok"


def test_a_port_that_is_taken_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert ports(taken).verdict == "warn"
        assert "--standalone" in ports(taken).fix
    assert ports(taken).verdict == "ok"


def test_a_name_without_an_address_is_noticed() -> None:
    assert host_name("localhost").verdict == "ok"
    assert "/etc/hosts" in host_name("no-such-host.invalid").fix


def test_a_name_server_that_does_not_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(address: tuple[str, int, int, int], flags: int) -> None:
        time.sleep(0.7 if next(turn) == 20 else 0)
        raise socket.gaierror

    turn = count()
    monkeypatch.setattr(socket, "getnameinfo", asked)
    found = connection_names(doctor_system._asked_at_once())
    assert (found.verdict, next(turn)) == ("warn", 32)
    assert found.evidence.startswith("the slowest of 32 look-ups of ::ffff:127.0.0.1 took 7")
    assert "/etc/hosts" in found.fix
    assert connection_names([0.002, 0.1]).verdict == "ok"


def test_the_disk_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = disk(tmp_path / "runs")
    assert found.numbers is not None
    assert found.numbers["bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(doctor_system, "_written", lambda _: (5e6, 0.1))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**40}))
    assert "--checkpoint-every" in disk(tmp_path).fix
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**20}))
    assert disk(tmp_path).verdict == "fail"
    monkeypatch.undo()
    if os.getuid():
        tmp_path.chmod(0o500)
        assert disk(tmp_path).verdict == "fail"


def test_cores() -> None:
    assert cores_per_worker(16, 8).verdict == "ok"
    assert cores_per_worker(15, 8).verdict == "warn"
    assert "1.88 for each of 8" in cores_per_worker(15, 8).evidence
