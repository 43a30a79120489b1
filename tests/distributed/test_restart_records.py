"""Error files for torchrun's box, and verdicts for the attempts that would repeat a hopeless one."""

import json
import os
from pathlib import Path

import pytest

from multigpu_cli.distributed.launch_env import (
    FinalVerdict,
    PreviousAttempt,
    find_binding_verdict,
    has_redirected_logs,
    list_recorded_runs,
    node_name,
    read_exit_codes,
    read_last_verdict,
    read_previous_attempt,
    record_attempt,
    record_end,
    record_failure,
    record_run,
    record_verdict,
    write_error,
)
from multigpu_cli.distributed.launch_env import attempt_number as number

Environment = dict[str, str]


def attempt(folder: Path, number: int, *, restarts: int = 2, rank: int = 0) -> Environment:
    """What an agent tells one rank of one attempt."""
    file = folder / f"attempt_{number}" / str(rank) / "error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_ERROR_FILE": str(file),
    }


def test_the_next_attempt_learns_the_verdict(tmp_path: Path) -> None:
    record_verdict(attempt(tmp_path, 0, rank=1), FinalVerdict(2, "wrong"))
    record_verdict(attempt(tmp_path, 0), FinalVerdict(75, "the first word counts"))
    assert find_binding_verdict(attempt(tmp_path, 1)) == FinalVerdict(2, "wrong")


def test_a_first_attempt_another_agent_and_no_agent_know_of_none(tmp_path: Path) -> None:
    record_verdict(attempt(tmp_path, 0), FinalVerdict(2, "wrong"))
    assert find_binding_verdict(attempt(tmp_path, 0)) is None
    assert find_binding_verdict({}) is None
    assert find_binding_verdict(attempt(tmp_path / "other", 1)) is None
    assert find_binding_verdict(attempt(tmp_path, 1) | {"TORCHELASTIC_ERROR_FILE": ""}) is None, "--log-dir /dev/null"


def test_nothing_is_left_where_no_attempt_follows(tmp_path: Path) -> None:
    record_verdict(attempt(tmp_path, 0, restarts=0), FinalVerdict(2, "wrong"))
    record_verdict(attempt(tmp_path, 2), FinalVerdict(2, "wrong"))
    record_verdict({}, FinalVerdict(2, "wrong"))
    assert list(tmp_path.glob("*.json")) == []


def test_a_failure_before_the_first_step_is_final(tmp_path: Path) -> None:
    assert "no restart" in record_failure(attempt(tmp_path, 0), "no such column", None)
    assert find_binding_verdict(attempt(tmp_path, 1)) == FinalVerdict(1, "no such column")


def test_the_same_failure_at_the_same_step_is_final_the_second_time(tmp_path: Path) -> None:
    assert record_failure(attempt(tmp_path, 0), "boom", 7) == ""
    assert record_failure(attempt(tmp_path, 0, rank=1), "boom", 7) == "", "another rank of the same attempt"
    assert find_binding_verdict(attempt(tmp_path, 1)) is None
    assert "step 7 again" in record_failure(attempt(tmp_path, 1), "boom", 7)
    assert find_binding_verdict(attempt(tmp_path, 2)) == FinalVerdict(1, "boom")


@pytest.mark.parametrize(("message", "step"), [("boom", 8), ("bang", 7)])
def test_another_failure_or_another_step_is_worth_an_attempt(tmp_path: Path, message: str, step: int) -> None:
    record_failure(attempt(tmp_path, 0), "boom", 7)
    assert record_failure(attempt(tmp_path, 1), message, step) == ""
    assert find_binding_verdict(attempt(tmp_path, 2)) is None


def test_attempts_are_counted_also_where_the_agent_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that joins restarts the others without raising their counts; one process is one attempt."""
    here = attempt(tmp_path, 0)
    assert number(here) == 0
    record_attempt(here, 4, ["a", "b"])
    assert number(here) == 4
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert number(here) == 5
    assert number(attempt(tmp_path, 7)) == 7, "attempts that died before they met"
    assert number(here | {"LOCAL_RANK": "1"}) == 0, "of another rank"


def test_a_verdict_is_of_the_nodes_that_came_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone again after the other node was stopped, this one goes on; together they would not."""
    here = attempt(tmp_path, 0)
    record_attempt(here, 0, [node_name(here), "another"])
    record_verdict(here, FinalVerdict(75, "stopped"))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    alone = attempt(tmp_path, 1) | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert find_binding_verdict(alone) is None
    assert find_binding_verdict(alone | {"WORLD_SIZE": "4"}) is None, "they have to meet first"
    found = read_last_verdict(alone)
    assert found is not None
    assert found.applies_to([node_name(here), "another"])


def test_a_node_that_comes_and_goes_again_brings_no_verdict_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These nodes were stopped when another came; it has gone, and they are the same again."""
    here = attempt(tmp_path, 0, restarts=5)
    for process, nodes in enumerate((["this"], ["this", "another"])):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        record_attempt(here, process, nodes)
        if not process:
            record_verdict(here, FinalVerdict(75, "stopped"))
    monkeypatch.setattr(os, "getpid", lambda: 2)
    assert number(here) == 2
    assert read_last_verdict(here) is None


def test_how_an_attempt_ended_is_for_the_next_one_alone(tmp_path: Path) -> None:
    record_end(tmp_path, 0, PreviousAttempt("rank 2 was lost", 7, 100.0))
    record_end(tmp_path, 0, PreviousAttempt("the first word counts", 7, 100.0))
    assert read_previous_attempt(attempt(tmp_path, 1)) == PreviousAttempt("rank 2 was lost", 7, 100.0)
    assert read_previous_attempt(attempt(tmp_path, 2)) is None
    record_end(None, 0, PreviousAttempt("no agent", None, 0.0))


def test_the_last_attempt_says_nothing_of_restarts(tmp_path: Path) -> None:
    assert record_failure(attempt(tmp_path, 0, restarts=0), "boom", None) == ""
    assert record_failure({}, "boom", None) == ""


def test_the_error_file_is_what_torchs_box_reads(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    write_error({"TORCHELASTIC_ERROR_FILE": str(file)}, 2, "error: no such data")
    content = json.loads(file.read_text())["message"]
    assert content["message"] == content["extraInfo"]["py_callstack"] == "error: no such data"
    assert content["extraInfo"]["timestamp"].isdecimal()
    assert content["errorCode"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["error.json"]


def test_the_last_attempt_says_how_it_ended(tmp_path: Path) -> None:
    for count, codes in ((2, [1]), (10, [75, 2]), (9, [130])):
        for rank, code in enumerate(codes):
            file = tmp_path / "run" / f"attempt_{count}" / str(rank) / "error.json"
            file.parent.mkdir(parents=True)
            write_error({"TORCHELASTIC_ERROR_FILE": str(file)}, code, "said")
    assert read_exit_codes(tmp_path) == {75, 2}
    (tmp_path / "run/attempt_10/1/error.json").write_text('{"message": {"message": "said by another program"}}')
    assert read_exit_codes(tmp_path) == {75, None}
    assert read_exit_codes(tmp_path / "nowhere") == set()


def test_the_error_file_gets_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent may read it at any moment."""
    whole: list[bool] = []
    original = Path.replace

    def watched(self: Path, target: str) -> Path:
        whole.append(not Path(target).exists() and "message" in json.loads(self.read_text()))
        return original(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    write_error({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}, 2, "error: no such data")
    assert whole == [True]


def test_nothing_is_written_without_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_error({}, 2, "error: no such data")
    assert list(tmp_path.iterdir()) == []


def test_files_of_torchruns_own_are_noticed(tmp_path: Path) -> None:
    environ = attempt(tmp_path, 0, rank=1)
    assert not has_redirected_logs(environ)
    assert not has_redirected_logs({})
    Path(environ["TORCHELASTIC_ERROR_FILE"]).with_name("stderr.log").touch()
    assert has_redirected_logs(environ)


def test_the_runs_of_a_launch_are_remembered_in_order_and_once(tmp_path: Path) -> None:
    for attempted, run in ((0, "one"), (0, "two"), (1, "one"), (1, "one"), (2, "three")):
        record_run(tmp_path, attempted, run)
    assert list_recorded_runs(tmp_path, [1]) == ["one"]
    assert list_recorded_runs(tmp_path, range(3)) == ["one", "two", "three"]
    assert list_recorded_runs(tmp_path, [7]) == list_recorded_runs(None, [0]) == []
    record_run(None, 0, "nowhere")
    record_run(tmp_path / "gone", 0, "nowhere")
