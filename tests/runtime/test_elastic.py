"""Error files for torchrun's box, and verdicts for the attempts that would repeat a hopeless one."""

import json
import tempfile
from pathlib import Path

import pytest

from multigpu_cli.runtime.elastic import Verdict, earlier_verdict, remember, write_error

FIRST = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "2"}
SECOND = FIRST | {"TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_next_attempt_learns_the_verdict() -> None:
    remember(FIRST, Verdict(2, "wrong"))
    remember(FIRST, Verdict(75, "the first word counts"))
    assert earlier_verdict(SECOND) == Verdict(2, "wrong")


def test_a_first_attempt_another_agent_and_another_run_know_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(FIRST, Verdict(2, "wrong"))
    assert earlier_verdict(FIRST) is None
    assert earlier_verdict({}) is None
    assert earlier_verdict(SECOND | {"TORCHELASTIC_RUN_ID": "other"}) is None
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert earlier_verdict(SECOND) is None


def test_nothing_is_left_where_no_attempt_follows_or_another_rank_writes(tmp_path: Path) -> None:
    remember(FIRST | {"TORCHELASTIC_MAX_RESTARTS": "0"}, Verdict(2, "wrong"))
    remember(FIRST | {"TORCHELASTIC_RESTART_COUNT": "2"}, Verdict(2, "wrong"))
    remember(FIRST | {"LOCAL_RANK": "1"}, Verdict(2, "wrong"))
    remember({}, Verdict(2, "wrong"))
    assert list(tmp_path.iterdir()) == []


def test_the_marker_is_ours_alone_and_links_are_not_followed(tmp_path: Path) -> None:
    remember(FIRST, Verdict(2, "wrong"))
    [marker] = tmp_path.iterdir()
    assert marker.stat().st_mode & 0o777 == 0o600
    planted = tmp_path / "planted"
    marker.rename(planted)
    marker.symlink_to(planted)
    assert earlier_verdict(SECOND) is None


def test_the_error_file_is_what_torchs_box_reads(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    write_error({"TORCHELASTIC_ERROR_FILE": str(file)}, "error: no such data")
    content = json.loads(file.read_text())["message"]
    assert content["message"] == content["extraInfo"]["py_callstack"] == "error: no such data"
    assert content["extraInfo"]["timestamp"].isdecimal()


def test_an_error_file_that_cannot_be_written_changes_nothing() -> None:
    write_error({"TORCHELASTIC_ERROR_FILE": "/nowhere/error.json"}, "error")
    write_error({}, "error")
