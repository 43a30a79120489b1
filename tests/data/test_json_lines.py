import re
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.data.files import JsonLines, open_records
from multigpu_cli.errors import RequestError


def write(folder: Path, text: str) -> JsonLines:
    path = folder / "rows.jsonl"
    path.write_bytes(text.encode())
    return JsonLines(path)


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_records_in_any_order(end: str, tmp_path: Path) -> None:
    rows = write(tmp_path, '{"text": "ä"}\n\n  \n{"text": "two"}\r\n{"n": 3}' + end)
    assert len(rows) == 3
    assert [rows[place] for place in (2, 0, 1)] == [{"n": 3}, {"text": "ä"}, {"text": "two"}]
    assert [rows.describe(place) for place in range(3)] == [f"{tmp_path}/rows.jsonl:{line}" for line in (1, 4, 5)]


def test_an_empty_file_has_none(tmp_path: Path) -> None:
    assert len(write(tmp_path, "\n")) == len(write(tmp_path, "")) == 0


def test_a_mark_at_the_beginning_and_both_halves_of_a_character_are_read(tmp_path: Path) -> None:
    assert write(tmp_path, '\ufeff{"text": "\\uD83D\\uDE00"}')[0] == {"text": "😀"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", r"not JSON \(Expecting [^()]* at character 2\)\n"),
        (b"[1]", "a list, not an object"),
        (b'{"text": "caf\xe9"}', "not UTF-8 text"),
        (b'{"text": "\\uD83D"}', "not UTF-8 text"),  # a half of a character, at which tokenizers stop
        (b'{"text": "\xed\xa0\xbd"}', "not UTF-8 text"),  # the same, as it is
    ],
)
def test_what_is_no_record_is_named(line: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n' + line)
    rows = JsonLines(tmp_path / "rows.jsonl")
    with pytest.raises(RequestError, match=f"rows.jsonl:2: {said}"):
        rows[1]


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_records_of_one_array(end: str, tmp_path: Path) -> None:
    rows = write(tmp_path, '\ufeff[{"text": "ä]"}, {"n":\n 2},\n\n {"text": "ö\u0085"} ]' + end)
    assert [rows[place] for place in (2, 0, 1)] == [{"text": "ö\u0085"}, {"text": "ä]"}, {"n": 2}]
    assert [rows.describe(place) for place in range(3)] == [f"{tmp_path}/rows.jsonl:{line}" for line in (1, 1, 4)]
    assert len(write(tmp_path, "[ ]")) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"n": 1},\n{"n": 2}', "2: not JSON (expecting , or ] at character 9)"),
        ('[{"n": 1},', "1: not JSON (Expecting value at character 11)"),
        ('[{"n": 1} {"n": 2}]', "1: not JSON (expecting , or ] at character 11)"),
        ("[1]\n[2]", "2: not JSON (the array has ended at character 1)"),
    ],
)
def test_what_is_no_array_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=re.escape(f"rows.jsonl:{said}")):
        write(tmp_path, text)


def write_parquet(path: Path, rows: list[dict[str, Any]], group: int) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow (extra arrow)")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


def test_records_of_parquet_files(tmp_path: Path) -> None:
    """A table has every field in each row: what is null was not there."""
    plain = [{"turns": [{"role": "user", "name": "A"}, {"role": "tool"}], "n": at} for at in range(5)]
    more: list[dict[str, Any]] = [{"turns": [], "n": None}, {"turns": [{"role": "ä", "name": None}], "n": 6}]
    paths = [write_parquet(tmp_path / "a.parquet", plain, 2), write_parquet(tmp_path / "b.parquet", more, 9)]
    rows = open_records(paths)
    found = [rows[at] for at in (6, 0, 4, 5)]
    assert found == [{"turns": [{"role": "ä"}], "n": 6}, plain[0], plain[4], {"turns": []}]
    assert [rows.describe(at) for at in (3, 5)] == [f"{tmp_path}/a.parquet, row 4", f"{tmp_path}/b.parquet, row 1"]
    assert len(rows) == 7
    assert rows.digest not in (open_records(paths[:1]).digest, open_records(paths[::-1]).digest)


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow (extra arrow)")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(RequestError, match=r"a\.parquet: no Parquet"):
        open_records([tmp_path / "a.parquet"])


def test_array_that_is_nested_deep_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1},\n' + "[" * 50_000 + "]" * 50_000 + "]")
    with pytest.raises(RequestError, match=r"a\.json: a record after line 1 is nested too deep"):
        JsonLines(tmp_path / "a.json")
