"""How far runs are, from their journals: while they live, when they hang, after they died."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import main_multi_gpu
from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.commands.status import find_runs, format_statuses, read_status, watch_runs
from multigpu_cli.errors import RequestError
from multigpu_cli.loggers.sender import Position, write_position
from multigpu_cli.mirror.follower import MirrorState, write_state
from tests.commands.runs import interrupted_run, run_folder

PLAN = {"total_steps": 100, "strategy": "ddp", "workers": 2, "device": "cpu"}


def line(time: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": time} | fields


def train(time: float, step: int, **more: Any) -> dict[str, Any]:
    return (
        line(time, "train", step=step, epoch=1, loss=9.0, mean_loss=1.5, step_ms=10.0, samples_per_second=640.0) | more
    )


BEGUN = [line(1000, "start", plan=PLAN, host="node7"), train(1010, 10), train(1030, 20)]


def run(folder: Path, events: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "tr')
    return folder


def abandon(folder: Path) -> Path:
    """A run whose process is gone."""
    (folder / ".lock").write_text(f"{os.uname().nodename} {2**22 + 1}")  # there is no greater id
    return folder


def test_a_run_at_work(tmp_path: Path) -> None:
    events = [
        *BEGUN,
        line(1031, "eval", step=20, split="val", loss=1.4, accuracy=0.5, perplexity=4.06, other=1),
        line(1032, "checkpoint", step=20),
    ]
    with lock_folder(run(tmp_path / "a", events)):
        found = read_status(tmp_path / "a", now=1040)
    assert (found.state, found.step, found.total_steps, found.alarms) == ("running", 20, 100, [])
    assert found.eta_seconds == 80 * 2 - 10  # 80 steps at the pace between the two lines, ten seconds of which are over
    assert (found.checkpoint_step, found.checkpoint_age, found.silent_seconds) == (20, 8, 8)
    assert "\n".join(format_statuses([found])).splitlines() == [
        f"{tmp_path}/a  running    step 20/100  epoch 1  loss 1.500  val loss 1.400  val accuracy 50.00 %"
        "  val perplexity 4.060  640 samples/s  2 min 30 s left",
        "  ddp, 2 workers, cpu on node7; checkpoint of step 20, 8 s ago; last line 8 s ago",
    ]


def test_silence_is_an_alarm_when_it_is_longer_than_usual(tmp_path: Path) -> None:
    with lock_folder(run(tmp_path / "a", BEGUN)):
        assert read_status(tmp_path / "a", now=1089).alarms == []
        (alarm,) = read_status(tmp_path / "a", now=1091).alarms
        assert alarm == "stalled: no line written for 1 min 1 s; the longest pause before was 20 s"
    with lock_folder(run(tmp_path / "b", [*BEGUN, train(1130, 30)])):
        assert read_status(tmp_path / "b", now=1130 + 299).alarms == [], "it was silent for 100 s before"
        assert len(read_status(tmp_path / "b", now=1130 + 301).alarms) == 1
    with lock_folder(run(tmp_path / "c", BEGUN[:1])):
        found = read_status(tmp_path / "c", now=1590)
        assert (found.state, found.alarms, found.eta_seconds) == ("starting", [], None)
        assert "stalled" in read_status(tmp_path / "c", now=1601).alarms[0]


def test_a_run_that_died_says_where_it_would_go_on(tmp_path: Path) -> None:
    found = read_status(abandon(run(tmp_path / "a", [*BEGUN, line(1032, "checkpoint", step=15)])), now=9999)
    assert (found.state, found.eta_seconds, len(found.alarms)) == ("died", None, 1)
    assert "resumes from step 15" in found.alarms[0]
    assert "starts from the beginning" in read_status(abandon(run(tmp_path / "b", BEGUN)), now=9999).alarms[0]
    assert read_status(run(tmp_path / "copy", BEGUN), now=9999).state == "unknown", "its process may be elsewhere"


def test_what_a_logger_lacks_is_an_alarm_once_the_run_has_ended(tmp_path: Path) -> None:
    folder = interrupted_run(tmp_path / "run")
    (folder / "loggers").mkdir()
    size = (folder / "journal.jsonl").stat().st_size
    for position, alarms in (
        (Position("mlflow", size), []),
        (Position("mlflow", 0, "no route"), [f"60 lines of {folder}/journal.jsonl not sent (no route)"]),
    ):
        write_position(folder, position)
        told = [alarm for alarm in read_status(folder, 2000.0).alarms if alarm.startswith("logger mlflow: ")]
        assert [alarm.partition(": ")[2].partition(";")[0] for alarm in told] == alarms


def test_what_a_mirror_lacks_is_an_alarm_once_the_run_has_ended(tmp_path: Path) -> None:
    folder = interrupted_run(tmp_path / "run")
    told = f"file:/m lacks the last files of the run (no route); {folder} has all of it; multigpu mirror {folder} --to "
    for state, alarms in (
        (MirrorState(url="file:/m", complete=True), []),
        (MirrorState(url="file:/m", error="no route"), [f"{told}file:/m sends it"]),
    ):
        write_state(folder, state)
        assert [alarm for alarm in read_status(folder, 2000.0).alarms if "file:/m" in alarm] == alarms


def test_faults_are_alarms_by_kind(tmp_path: Path) -> None:
    events = [
        *BEGUN,
        line(1031, "fault", kind="nonfinite", action="1 step skipped", step=20),
        line(1032, "fault", kind="out of memory", action="micro-batches of 16 instead of 32", step=21),
        line(1033, "fault", kind="nonfinite", action="2 steps skipped", step=30),
        train(1034, 30, loss="NaN"),
        line(1035, "end", status="failed", step=30, cause="ValueError: the planted fault", rank=0),
    ]
    found = read_status(run(tmp_path / "a", events), now=1040)
    assert found.state == "failed"
    assert found.alarms == [
        "failed at step 30: ValueError: the planted fault",
        "nonfinite (2 times): at step 30: 2 steps skipped",
        "out of memory: at step 21: micro-batches of 16 instead of 32",
        "the loss is NaN",
    ]


def test_status_keeps_the_cause_of_an_earlier_failure(tmp_path: Path) -> None:
    """It is in the journal, whatever summary.json says; what a completed run went through is no alarm."""
    failure = line(1035, "end", status="failed", step=30, cause="rank 1 was killed (SIGKILL)", rank=1)
    again = [line(5000, "start", plan=PLAN, resumed_from="x"), line(5000, "resume", step=20), train(5001, 30)]
    folder = run(tmp_path / "a", [*BEGUN, train(1034, 30), failure, *again])
    with lock_folder(folder):
        assert read_status(folder, now=5001).alarms == ["attempt 1 failed at step 30: rank 1 was killed (SIGKILL)"]
    for number, (status, alarms) in enumerate(
        [("completed", []), ("failed", ["failed at step 40: summary.json says why"])]
    ):
        end = line(5002, "end", status=status, step=40)
        assert read_status(run(tmp_path / str(number), [*BEGUN, failure, *again, end]), now=5003).alarms == alarms


def test_after_a_restart_the_pace_is_that_of_the_new_attempt(tmp_path: Path) -> None:
    again = [line(5000, "start", plan=PLAN, resumed_from="x"), line(5000, "resume", step=20), train(5001, 30)]
    with lock_folder(run(tmp_path / "a", [*BEGUN, *again])):
        found = read_status(tmp_path / "a", now=5001)
    assert (found.attempts, found.step) == (2, 30)
    assert found.eta_seconds == pytest.approx(70 * 0.01)


def test_what_a_restart_has_cost_is_said(tmp_path: Path) -> None:
    again = [line(1100, "start", plan=PLAN, resumed_from="x"), line(1100, "resume", step=15), train(1111, 30)]
    cost = line(1105, "recovery", step=16, seconds=75.0, lost_steps=5, cause="rank 1 was killed by SIGKILL")
    found = read_status(run(tmp_path / "a", [*BEGUN, *again, cost]), now=1112)
    assert (found.recovery_seconds, found.lost_steps) == (75, 5)
    assert "; started 2 times, training again after 1 min 15 s, 5 steps done twice" in "\n".join(
        format_statuses([found])
    )


def test_runs_are_named_or_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="checkpoints has no run"):
        find_runs([])
    run(tmp_path / "checkpoints/digits/one", BEGUN)
    assert find_runs([]) == find_runs(["checkpoints", "checkpoints/digits/one"]) == [Path("checkpoints/digits/one")]


def test_the_best_run_comes_first_with_its_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run at work is compared by what it has so far; one without an evaluation comes last."""
    for name, loss, rate in (("a", 0.4, 0.1), ("b", 0.2, 0.001)):
        summary = {"status": "completed", "final": {"val_loss": loss, "train_loss": 0.9}}
        ended = [*BEGUN, line(1031, "end", status="completed", step=20)]
        run_folder(tmp_path / name, ended, summary, lr=rate, freeze=["stem.*"], exact=True)
    run(tmp_path / "c", [*BEGUN, line(1031, "eval", step=20, split="val", loss=0.3)])
    run(tmp_path / "d", BEGUN)
    assert main_multi_gpu.run(["status", str(tmp_path), "--sort-by", "val_loss"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "by val_loss, lowest first:"
    assert "  train loss 0.9000  " in shown[1], "of the epoch, in place of the last lines'"
    runs = [said.split("  ")[:2] for said in shown if said.startswith("val_loss")]
    assert [value.split()[1] for value, *_ in runs] == ["0.2", "0.3", "0.4", "unknown"]
    commands = [said for said in shown if said.startswith("  python")]
    assert commands == ["  python main_multi_gpu.py --freeze 'stem.*' --lr 0.001 --exact"]
    assert shown.index(commands[0]) < next(at for at, said in enumerate(shown) if f"{tmp_path}/c" in said)
    assert main_multi_gpu.run(["status", str(tmp_path), "--sort-by", "val_loss", "--json"]) == 0
    best, *rest = json.loads(capsys.readouterr().out)
    assert (best["run"], best["sort_value"], best["command"]) == (str(tmp_path / "b"), 0.2, commands[0].strip())
    assert [each["command"] for each in rest] == [None] * 3
    assert main_multi_gpu.run(["status", str(tmp_path), "--sort-by", "val_los"]) == 2
    assert "did you mean 'val_loss'?" in capsys.readouterr().err


def test_watching_ends_with_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "a", [line(time.time(), "start", plan=PLAN), train(time.time(), 10)])
    with lock_folder(folder):

        def let_it_end(_: float) -> None:
            with open(folder / "journal.jsonl", "a") as journal:
                journal.write("\n" + json.dumps(line(time.time(), "end", status="completed", step=100)) + "\n")

        monkeypatch.setattr(time, "sleep", let_it_end)
        watch_runs([str(folder)], as_json=True, repeat=True)
    states = [json.loads(said)[0]["state"] for said in capsys.readouterr().out.splitlines()]
    assert states == ["running", "completed"]
    watch_runs([str(folder)], as_json=False, repeat=True)
    assert "\x1b" not in capsys.readouterr().out, "only a terminal is painted"


def test_a_journal_without_a_line_is_told(tmp_path: Path) -> None:
    said = "\n".join(format_statuses([read_status(run(tmp_path / "a", []), time.time())]))
    assert "no start recorded yet; no checkpoint yet" in said
    assert "None" not in said


def test_what_a_journal_says_gives_no_orders_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    title = line(1040, "fault", kind="x", action="\x1b]0;owned\x07 two\nlines", step=20)
    watch_runs([str(run(tmp_path / "a", [*BEGUN, title]))], as_json=False, repeat=False)
    shown = capsys.readouterr().out
    assert r"\x1b]0;owned\x07 two | lines" in shown
    assert "\x1b" not in shown


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(run(tmp_path / "a", [*BEGUN, line(1031, "end", status="completed", step=100)]))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/journal.jsonl").touch()
    assert main_multi_gpu.run(["status", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "completed"
    assert main_multi_gpu.run(["status", str(tmp_path)]) == 0
    assert "empty  unknown" in capsys.readouterr().out
    assert main_multi_gpu.run(["status", str(tmp_path / "nothing")]) == 2


def test_torch_is_not_needed() -> None:
    code = "import sys, multigpu_cli.commands.status; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
