"""No text of a stranger's file reaches the terminal with characters that it would obey."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis.strategies import text
from torch import nn

import main_multi_gpu
from multigpu_cli.checkpoint.weights import check_fit
from multigpu_cli.commands.status import watch_runs
from multigpu_cli.config.regular_files import refuse_links
from multigpu_cli.errors import RequestError, make_line, make_printable
from tests.commands.runs import PLAN, event, lines, run_folder

ESCAPES = "\x1b]0;owned\x07\x1b[2J\rerror: forged\u202e"


@given(text())
def test_printable_text_has_no_control_characters(original: str) -> None:
    shown = make_printable(original)
    assert all(letter.isprintable() or letter in "\n\t\u200c\u200d" for letter in shown)
    if original.isprintable():
        assert shown == original
    assert make_printable(shown) == shown


@given(text())
def test_line_of_any_text_is_one_line(original: str) -> None:
    assert len(make_line(f"{original}.").splitlines()) == 1
    if original.isprintable():
        assert make_line(original) == original


FORGED = "vm\ngood  completed\nerror: forged line\r\t"


def write_forging_run(folder: Path) -> Path:
    """Each text of the journal and of a folder's name tries to add lines to the output."""
    plan = PLAN | {"contents": FORGED, "strategy": FORGED, "device": FORGED, "threads": FORGED}
    events = [
        event(1, "start", plan=plan, host=FORGED, devices=FORGED, versions={FORGED: FORGED}),
        *lines(1, 8, 1),
        event(9, "fault", kind=FORGED, action=FORGED, step=8),
        event(10, "eval", split="val", step=8, epoch=2, samples=9, loss=1.0, **{FORGED: 0.5}),
        event(11, "eval", split="val", step=FORGED),
        event(12, "end", status="failed", step=8, cause=FORGED),
    ]
    run = run_folder(folder, events, {"status": "completed", "fingerprint": FORGED})
    (run / "checkpoints" / FORGED).mkdir(parents=True)
    return run


@pytest.mark.parametrize("command", ["status", "verify", "checkpoints", "clean", "evaluate"])
@pytest.mark.filterwarnings("ignore:.* damaged, and not used")
def test_command_shows_no_forged_lines_of_a_run(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, other = write_forging_run(tmp_path / "run"), run_folder(tmp_path / "other", [event(1, "start")], {})
    main_multi_gpu.run([command, str(run), *([str(other)] if command == "verify" else [])])
    main_multi_gpu.run([command, str(run), *([str(run)] if command == "verify" else [])])
    out, err = capfd.readouterr()
    assert out + err
    assert not [line for line in (out + err).splitlines() if line.startswith(("good", "error: forged"))]


def test_error_of_settings_shows_no_forged_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", [event(1, "start")])
    (run / "config.yaml").write_text('"a\\nerror: forged": 1\ndata: {"x\\nerror: forged": 2}\n')
    assert main_multi_gpu.run(["verify", str(run), str(run)]) == 2
    assert capfd.readouterr().err.count("\nerror: ") == 1, "the second of two errors; neither is forged"


@pytest.mark.filterwarnings("ignore:.* damaged, and not used")
def test_refusal_shows_no_forged_lines(tmp_path: Path) -> None:
    run = write_forging_run(tmp_path / "run")
    with pytest.raises(RequestError) as unknown:
        watch_runs([str(run)], as_json=False, repeat=False, sort_by="zzz")
    (run / "logs").mkdir()
    (run / "logs" / FORGED.rstrip()).symlink_to("elsewhere")
    with pytest.raises(RequestError) as link:
        refuse_links(run)
    with pytest.raises(RequestError) as misfit:
        check_fit(nn.Linear(1, 1), {FORGED: 1}, "best.pt")
    shown = "\n".join(str(each.value) for each in (unknown, link, misfit))
    assert shown.count("forged") == 3
    assert not [line for line in shown.splitlines() if line.startswith(("good", "error: forged"))]


def test_warning_of_a_run_is_one_line(tmp_path: Path) -> None:
    run = write_forging_run(tmp_path / f"run{FORGED}")
    (run / "summary.json").write_text(json.dumps({"final": {FORGED: []}}))
    with pytest.warns(UserWarning, match="damaged, and not used") as warned:
        main_multi_gpu.run(["status", str(run)])
    assert all(len(str(each.message).splitlines()) == 1 for each in warned)


def test_cause_of_several_lines_stands_in_one_line_of_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(
        tmp_path / "run", [event(1, "start"), event(2, "end", status="failed", step=8, cause="no data\n  try: again")]
    )
    assert main_multi_gpu.run(["status", str(run)]) == 0
    assert "  ! failed at step 8: no data | try: again\n" in capsys.readouterr().out


def write_hostile_run(folder: Path) -> Path:
    """Every name and text of the journal and the summary tries to drive the terminal."""
    plan = PLAN | {"contents": ESCAPES, "strategy": ESCAPES, "device": ESCAPES}
    events = [
        event(1, "start", plan=plan, host=ESCAPES, versions={ESCAPES: ESCAPES}),
        *lines(1, 8, 1),
        event(9, "fault", kind=ESCAPES, action=ESCAPES, step=8),
        event(10, "eval", split="val", step=8, epoch=2, samples=9, loss=1.0, **{ESCAPES: 0.5}),
        event(11, "end", status="failed", step=8),
    ]
    run = run_folder(folder, events)
    (run / "summary.json").write_text(json.dumps({"status": "failed", "error": ESCAPES, "mirror": ESCAPES}))
    return run


@pytest.mark.parametrize("command", ["status", "report", "checkpoints", "verify", "evaluate"])
def test_command_shows_no_escapes_of_a_run(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = write_hostile_run(tmp_path / "run\x1b[2J")
    other = [str(run)] if command == "verify" else []
    main_multi_gpu.run([command, str(run), *other])
    out, err = capfd.readouterr()
    assert out + err
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(out + err)


def test_warning_shows_no_escapes_of_a_file(tmp_path: Path) -> None:
    """Python's own warnings pass the same function, and those of ours name no line of code."""
    run = write_hostile_run(tmp_path / "run\x1b[2J")
    (run / "logs").mkdir()
    (run / "logs/state.json").write_text("[")
    command = [sys.executable, main_multi_gpu.__file__, "status", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith(f"warning: {tmp_path}/run\\x1b[2J/logs/state.json is damaged, and not used: ")
    assert done.stderr.count("warning: ") == 1
    assert ".py" not in done.stderr
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(done.stdout + done.stderr)
    foreign = main_multi_gpu.format_warning("\x1b[2J", UserWarning, "/lib/backend.py", 7)
    assert foreign == "warning: \\x1b[2J (UserWarning, /lib/backend.py:7)\n"


def test_wrong_request_shows_no_escapes_of_its_words(capfd: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["--model", f"mlp{ESCAPES}"]) == 2
    assert "\x1b" not in capfd.readouterr().err
