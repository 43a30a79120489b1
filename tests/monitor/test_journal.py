import json
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.monitor.journal import Journal, dump_json, read_events


def refuse_constant(text: str) -> float:
    raise AssertionError(f"{text} is no JSON")


def test_every_line_is_one_object_with_event_and_time(tmp_path: Path) -> None:
    before = time.time()
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.write("start", devices=["cpu", "cpu"])
        journal.write("train", step=1, loss=0.1 + 0.2)
    start, train = map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
    assert start["event"] == "start"
    assert start["devices"] == ["cpu", "cpu"]
    assert before <= start["time"] <= train["time"] <= time.time()
    assert train["loss"] == 0.1 + 0.2  # to the last bit


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_finite_floats_keep_full_precision(value: float) -> None:
    assert json.loads(dump_json({"loss": value}))["loss"] == value


def test_non_finite_numbers_become_strings_that_float_reads() -> None:
    text = dump_json({"loss": math.nan, "per_rank": [math.inf, (-math.inf, 1.5)]})
    found = json.loads(text, parse_constant=refuse_constant)
    assert found == {"loss": "NaN", "per_rank": ["Infinity", ["-Infinity", 1.5]]}
    assert math.isnan(float(found["loss"]))


def test_something_that_is_no_plain_data_is_refused(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal, pytest.raises(TypeError):
        journal.write("train", loss=object())
    assert not (tmp_path / "journal.jsonl").read_text()


def test_a_torn_last_line_is_passed_over_and_ended_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event": "start", "time": 1.0}\n{"event": "train", "lo')
    assert [entry["event"] for entry in read_events(path)] == ["start"]
    with closing(Journal(path)) as journal:
        journal.write("resume", step=1)
        journal.write("end")
    assert [entry["event"] for entry in read_events(path)] == ["start", "resume", "end"]


def test_reopening_appends_without_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for event in ("start", "resume"):
        with closing(Journal(path)) as journal:
            journal.write(event)
    assert path.read_text().count("\n") == len(path.read_text().splitlines()) == 2


def test_a_killed_writer_leaves_every_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    endless = textwrap.dedent(f"""
        from multigpu_cli.monitor.journal import Journal
        journal, step = Journal({str(path)!r}), 0
        while True:
            step += 1
            journal.write("train", step=step, padding="x" * 500)
    """)
    with subprocess.Popen([sys.executable, "-c", endless]) as writer:
        deadline = time.monotonic() + 20
        while (not path.exists() or path.stat().st_size < 100_000) and time.monotonic() < deadline:
            time.sleep(0.01)
        writer.kill()
    steps = [entry["step"] for entry in read_events(path)]
    assert len(steps) > 50
    assert steps == list(range(1, len(steps) + 1))
    assert len(path.read_bytes().splitlines()) - len(steps) <= 1


def test_threads_do_not_mix_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_write(file: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        time.sleep(0.001)
        return write(file, data[:2000])  # a short write: the rest follows in a second one

    monkeypatch.setattr(os, "write", slow_write)
    path = tmp_path / "journal.jsonl"
    with closing(Journal(path)) as journal:
        threads = [
            threading.Thread(target=lambda name=name: [journal.write(name, text="y" * 3000) for _ in range(50)])
            for name in ("train", "checkpoint")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert sorted(events) == ["checkpoint"] * 50 + ["train"] * 50


def test_listeners_get_each_event_as_it_was_given(tmp_path: Path) -> None:
    heard: list[dict[str, object]] = []
    with closing(Journal(tmp_path / "journal.jsonl", [heard.append])) as journal:
        returned = journal.write("train", step=1, loss=math.inf, folder=tmp_path)
    assert heard == [returned]
    assert heard[0]["loss"] == math.inf
    assert next(read_events(tmp_path / "journal.jsonl"))["folder"] == str(tmp_path)


def test_without_a_path_nothing_is_written() -> None:
    heard: list[dict[str, object]] = []
    with closing(Journal(None, [heard.append])) as journal:
        journal.write("train", step=3)
    assert heard[0]["step"] == 3


def test_lines_of_something_else_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    """Those that are no JSON were cut off by a kill; of others it warns, with the name of the file."""
    unfit = b'{"event": "train"}\n{"event": "start", "time": "noon"}\n{"event": 5, "time": 3}\n'
    path.write_bytes(b'\x00\x00\xff\n3\n[]\n{"step": 1}\n\n' + unfit + b'{"event": "end", "time": 2.0}\n')
    with pytest.warns(UserWarning, match=r"journal\.jsonl: a line is damaged, and not used: ") as warned:
        assert [entry["event"] for entry in read_events(path)] == ["end"]
    assert len(warned) == 6
