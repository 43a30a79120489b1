from pathlib import Path

import pytest

from multigpu_cli.data.files import JsonLines
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
        (b'{"text": "caf\xe9"}', "no text in UTF-8"),
        (b'{"text": "\\uD83D"}', "no text in UTF-8"),  # a half of a character, at which tokenizers stop
        (b'{"text": "\xed\xa0\xbd"}', "no text in UTF-8"),  # the same, as it is
    ],
)
def test_what_is_no_record_is_named(line: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n' + line)
    rows = JsonLines(tmp_path / "rows.jsonl")
    with pytest.raises(RequestError, match=f"rows.jsonl:2: {said}"):
        rows[1]
