import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.data.rows.jsonl import JsonStore
from multigpu_cli.errors import RequestError
from tests.support.row_files import ROWS, write_jsonl


def test_rows_come_from_all_files_in_order(tmp_path: Path) -> None:
    store = JsonStore([write_jsonl(tmp_path / "a.jsonl", ROWS[:10]), write_jsonl(tmp_path / "b.jsonl", ROWS[10:])])
    assert len(store) == 60
    assert store.read("a", [0, 59, 10]).tolist() == [0.0, 59 / 4, 2.5]
    assert store.read("kind", [1, 2]) == ["dog", "cat"]
    assert store.list_values("label") == [0, 1]
    assert (store.columns["label"].dtype, store.columns["a"].dtype) == ("int64", "float64")


def test_types_hold_for_all_rows(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"x": 1, "y": None}, {"x": 2.5, "y": 1}, {"y": 2, "x": 3, "deep": {"z": 1}}]
    store = JsonStore([write_jsonl(tmp_path / "a.jsonl", rows)])
    assert store.columns["x"].dtype == "float64"
    assert store.read("x", [0, 1]).tolist() == [1.0, 2.5]
    assert (store.columns["y"].null_count, store.columns["deep"].null_count, store.columns["deep"].kind) == (
        1,
        2,
        "other",
    )
    with pytest.raises(RequestError, match="more than 1,000"):
        store.list_values("x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": "x"}\n', r"a\.jsonl:2: 'a' is a text, and a number before"),
        ('{"a": [1, 2]}\n\n{"a": [1]}\n', r"a\.jsonl:3: 'a' is numbers \(1,\), and numbers \(2,\) before"),
        ('{"a": 1}\n{"a"\n', r"a\.jsonl:2: not JSON"),
        ("[1]\n", r"a\.jsonl:1: a list, not an object"),
        ("\n", "no rows"),
    ],
)
def test_lines_that_are_no_rows_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        JsonStore([path])


@pytest.mark.parametrize(
    ("text", "message"),
    [("x" * 4000, "not JSON"), ("", r"a\.jsonl ends at byte"), ('{"b": 1}'.ljust(4000), "not JSON|no 'a'")],
)
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")
    store = JsonStore([path])
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        store.read("a", [0])


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")
    store = JsonStore([path])
    path.unlink()
    with pytest.raises(RequestError, match=r"a\.jsonl: No such file"):
        store.read("a", [0])


@pytest.mark.parametrize(
    ("values", "gap"),
    [
        (["1", "NaN", "2"], 2),
        (["1", "2", "-Infinity"], 3),
        (["null", "1", "2"], 1),
        (["[1, 2]", "[3, NaN]", "[5, 6]"], 2),
        (["[1, 2]", "[3, 4]", "[5, Infinity]"], 3),
    ],
)
def test_nan_and_infinity_count_as_missing_with_their_place(tmp_path: Path, values: list[str], gap: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(f'{{"a": {value}, "b": 1}}' for value in values))
    column = JsonStore([path]).columns["a"]
    assert (column.null_count, column.first_null) == (1, f"{path}:{gap}")


@given(st.lists(st.sampled_from(['{"a": 1}', '{"a": null}', '{"a": NaN}', "{}", '{"b": 2}']), min_size=1, max_size=9))
def test_rows_without_a_value_add_up(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    lines = [*lines, '{"a": 2.5, "b": 3}']
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    path.write_text("\n".join(lines))
    columns = JsonStore([path]).columns
    for name in ("a", "b"):
        gaps = [number for number, line in enumerate(lines, 1) if json.loads(line).get(name) not in (1, 2, 2.5, 3)]
        first = f"{path}:{gaps[0]}" if gaps else ""
        assert (columns[name].null_count, columns[name].first_null) == (len(gaps), first)


@pytest.mark.parametrize("text", [b'"\\ud800a"', b'"\xed\xa0\x80a"'])
def test_half_a_character_is_refused_with_its_line(tmp_path: Path, text: bytes) -> None:
    """It could be a label, which `predict` could not write."""
    (tmp_path / "a.jsonl").write_bytes(b'{"kind": "b"}\n{"kind": ' + text + b"}\n")
    with pytest.raises(RequestError, match=r"a\.jsonl:2: not JSON"):
        JsonStore([tmp_path / "a.jsonl"])
