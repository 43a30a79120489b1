"""The benchmark: one real run is read for what it says, the rest is arithmetic on planted figures."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.commands import bench
from multigpu_cli.commands.bench import benched, counts, one_run, show, write
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import RequestError
from multigpu_cli.launch import WorkersFailed
from multigpu_cli.planning.speedup import Wire

OWN = {"data": "tests.own:tensors", "model": "tests.own:net"}


def test_numbers_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "visible_gpus", lambda: 6)
    assert counts(None) == [1, 2, 4]
    assert counts("6,3") == [1, 3, 6]
    for words in ("0", "x", "7"):
        with pytest.raises(RequestError, match=f"--workers {words}"):
            counts(words)


def test_a_real_run_is_read(tmp_path: Path) -> None:
    """The planted millisecond of each sample is the data share; the request says all that the user said."""
    config = resolve(OWN | {"data": "tests.own:SlowItems", "batch_size": "10", "num_workers": "0"}, [], None)
    found = one_run(config, 1, 16, tmp_path / "a", os.environ)
    assert found["data"] > 0.5
    assert sum(found[name] for name in ("data", "wire", "stragglers", "compute")) == pytest.approx(1)
    assert found["step_ms"] * found["data"] > 10
    request = (tmp_path / "a.yaml").read_text()
    assert "max_steps: 16" in request
    assert "SlowItems" in request


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkersFailed, match="no module 'nowhere'"):
        one_run(resolve({"model": "nowhere:net"}, [], None), 1, 8, tmp_path / "a", os.environ)


def test_what_is_made_of_the_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One worker takes 10 ms for 32 samples, two take 12.5 ms for 64, a fifth of which is the wire."""
    order: list[int] = []

    def planted(config: Config, workers: int, *rest: Any) -> dict[str, float]:
        order.append(workers)
        wire = 0.2 if workers > 1 else 0.0
        shares = {"data": 0.05, "wire": wire, "stragglers": 0.0, "compute": 0.95 - wire}
        return shares | {"step_ms": (10.0 if workers == 1 else 12.5) + len(order) % 2}

    monkeypatch.setattr(bench, "one_run", planted)
    monkeypatch.setattr("multigpu_cli.commands.plan_measure.cores", lambda: 1)
    monkeypatch.setattr(bench, "measured_wire", lambda workers: Wire("planted", 0.0, 1e30, "planted"))
    found = benched(resolve(OWN, [], None), [1, 2], 8, 3, {})
    assert order == [1, 2] * 3, "interleaved"
    one, two = found.rungs
    assert (one.median, two.median) == (11.0, 12.5)
    assert two.speedup == pytest.approx(2 * 11 / 12.5)
    assert two.efficiency == pytest.approx(11 / 12.5)
    assert two.error == pytest.approx(two.forecast_ms / 12.5 - 1)
    assert found.knob.startswith("the wire")
    files = write(found, tmp_path / "out")
    assert json.loads(files[0].read_text())["rungs"][1]["workers"] == 2
    assert files[1].read_bytes().startswith(b"\x89PNG")
    show(found, files, as_json=False)
    assert "what would help most: the wire" in capsys.readouterr().out
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="--out"):
        write(found, tmp_path / "file")
