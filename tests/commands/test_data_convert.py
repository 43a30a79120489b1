import json
from pathlib import Path

import pytest

from main_multi_gpu import run
from tests.support.row_files import write_jsonl


def test_it_says_rows_and_bytes_and_what_to_type_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "to"
    assert run(["data", "convert", str(source), "--to", str(target), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (file,) = target.glob("*.arrow")
    assert (found["rows"], found["bytes"], found["columns"]["kind"]) == (60, file.stat().st_size, "string")
    assert run(["data", "convert", str(source), "--to", str(tmp_path / "again")]) == 0
    printed = capsys.readouterr().out
    assert "60 rows" in printed
    assert "--data arrow --data-dir" in printed


def test_an_existing_folder_is_a_wrong_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    assert run(["data", "convert", str(source), "--to", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
