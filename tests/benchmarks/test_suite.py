"""Every benchmark runs in a tiny setting and says what it should; how fast it was is nobody's business here."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.paired_timing import Row, Seconds, alternate, row, table, tenth
from benchmarks.suite import PARTS, SUM, last_recorded, part, sum_up
from tests.benchmarks.forked import run_module

SITE = Path(__file__).resolve().parents[1] / "support" / "site"


@pytest.mark.parametrize(
    "name",
    ["step_overhead", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hooks", "monitoring", "startup"))],
)
def test_a_benchmark_gives_rows_with_aims(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "step_overhead":  # the others are started
        monkeypatch.setattr(subprocess, "run", run_module)
    rows = part(name, tiny=True)
    assert all(each.least <= each.value <= each.most for each in rows)
    assert any(each.aim is not None for each in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted({*PARTS, "peers_chat", "logits_memory"} - {"startup", "step_overhead", "hooks", "monitoring"})
)
def test_the_longer_ones_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SITE))  # transformers loads torchvision
    assert part(name, tiny=True)


def test_sides_take_turns_and_the_first_step_of_a_turn_is_not_counted() -> None:
    calls: list[str] = []
    ticks = iter(range(1000))
    found = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, lambda: next(ticks))
    assert "".join(calls) == "aaaabbbb" * 2
    assert {side: len(values) for side, values in found.of.items()} == {"a": 6, "b": 6}


def test_a_ratio_is_that_of_the_blocks_tenth_percentiles() -> None:
    seconds = Seconds()
    seconds.of = {"ours": [3.0] * 99 + [50.0], "theirs": [2.0] * 100}
    found = seconds.ratio("r", "ours", "theirs", aim=1.2)
    assert (found.value, found.least, found.most) == (1.5, 1.5, 1.5)
    assert found.verdict == "≤ 1.2 missed"
    assert tenth([5, 1, 4, 2, 3, 9, 8, 7, 6, 0, 10]) == 1


def test_the_table_stands_beside_the_last_result(tmp_path: Path) -> None:
    for time, found in ((2.0, {"figure one": 1.5}), (1.0, {"figure one": 1.7, "two": 1.7})):
        rows = [vars(Row(figure, value, value, value)) for figure, value in found.items()]
        (tmp_path / f"{time}.json").write_text(json.dumps({"time": time, "rows": rows}))
    text = table([row("figure one", [1.0, 2.0, 3.0])], last_recorded(tmp_path))
    assert text.splitlines()[1].split() == ["figure", "one", "2", "1", "…", "3", "ratio", "1.5"]
    assert last_recorded(tmp_path) == {"figure one": 1.5, "two": 1.7}, "the later file has one part only"
    assert last_recorded(tmp_path / "nowhere") == {}


def test_the_sum_stands_beside_that_of_the_old_state() -> None:
    rows = [row(name, [1.0]) for name in SUM] + [row("another figure", [1.0])]
    lines = sum_up(rows, {SUM[0]: 2.0}).splitlines()
    assert len(lines) == 6
    assert lines[0].split()[-2:] == ["/", "6d24263"]
    now, recorded, old, ratio = map(float, lines[1].removeprefix(SUM[0]).split())
    assert (now, recorded) == (1, 2)
    assert 0.8 < old < 1.2
    assert ratio == pytest.approx(1 / old, abs=0.002)


def test_a_peer_that_is_not_installed_is_said_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda package: package == "torch")
    assert list(peers.installed()) == ["hand-written loop", "ours"]
    assert capsys.readouterr().err.count("is not installed") == 4
