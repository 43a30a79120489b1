from pathlib import Path

import pytest

from multigpu_cli.data.json_lines import JsonLines
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


@pytest.mark.parametrize(("line", "said"), [("{", "not JSON"), ("[1]", "a list, not an object")])
def test_what_is_no_record_is_named(line: str, said: str, tmp_path: Path) -> None:
    rows = write(tmp_path, '{"a": 1}\n' + line)
    with pytest.raises(RequestError, match=f"rows.jsonl:2: {said}"):
        rows[1]
