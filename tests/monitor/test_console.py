import io
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pexpect
import pytest

from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.format import format_epoch

ROWS = [
    ("device", "2 × CPU, because torchrun started 2 processes and no GPU is visible to any of them"),
    ("batch", "64"),
]
TRAIN = {"event": "train", "time": 1.0, "step": 50, "epoch": 1, "mean_loss": 0.5, "lr": 1e-3, "grad_norm": 2.0}
EVAL = {"event": "eval", "time": 1.0, "step": 50, "epoch": 1, "split": "test", "loss": 0.5, "samples": 7}
EPOCHS = [
    (format_epoch(9, 10, {"train_loss": 0.6543, "val_loss": 0.5, "val_accuracy": 0.9}, 980.4, 9.87), True),
    (format_epoch(10, 10, {"train_loss": 0.05123, "val_loss": 1.5, "val_accuracy": 1.0}, 12_345.6, 10.12), False),
]
SUMMARY: dict[str, Any] = {
    "status": "completed", "steps": 50, "final": {"test_accuracy": 0.975, "test_loss": float("nan")},
    "fingerprint": "ab" * 32, "save_dir": "runs/x",
    "per_class": [{"f1": 0.5}, {"f1": 1.0}], "confusion": [[1, 1], [0, 2]],
}  # fmt: skip


def run_through(console: Console) -> None:
    console.plan(ROWS, "Plan")
    progress = console.progress(200, initial=10)
    progress.update(50)
    console.train(TRAIN)
    for cells, best in EPOCHS:
        console.epoch(cells, best=best)
    console.eval(EVAL)
    console.note("noted")
    console.detail("detailed")
    console.details(lambda: [("versions", "of everything")])
    console.warn("beware")
    progress.close()
    console.report(SUMMARY, ["cat", "dog"])


def print_run(level: Any) -> str:
    stream = io.StringIO()
    run_through(Console(level, stream))
    return stream.getvalue()


def test_where_there_is_no_terminal_lines_are_plain() -> None:
    text = print_run("normal")
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[:3] == ["Plan", f" device  {ROWS[0][1]}", " batch   64"]  # never wrapped: people grep in it
    assert "step 50/200  epoch 1  loss since the last line 0.5000  lr 0.001000" in lines
    at = lines.index(
        "epoch     9/10  train loss   0.6543  val loss   0.5000  val accuracy  90.00 %  samples/s      980"
        "  seconds      9.9  best"
    )
    assert lines[at + 1] == (
        "epoch    10/10  train loss   0.0512  val loss   1.5000  val accuracy 100.00 %  samples/s   12,346"
        "  seconds     10.1"
    )
    assert "epoch 1    test  loss 0.5000    (7 samples)" in lines
    assert "noted" in lines
    assert "detailed" not in lines
    assert "Details" not in lines
    assert " test accuracy  97.50 %" in lines
    assert any(line.split() == ["cat", "0.5000"] for line in lines)
    assert any(line.split() == ["1", "dog", "0", "2"] for line in lines)


def test_quiet_keeps_warnings_and_one_line_of_result() -> None:
    assert print_run("quiet").splitlines() == [
        "warning: beware", "status completed 50 steps  test accuracy 97.50 %  test loss nan  save dir runs/x",
    ]  # fmt: skip


def test_silent_is_silent() -> None:
    assert print_run("silent") == ""


def test_verbose_adds_details() -> None:
    lines = print_run("verbose").splitlines()
    at = lines.index("Details")
    assert lines[at + 1] == " versions  of everything"
    assert "detailed" in lines
    step = "step 50/200  epoch 1  loss since the last line 0.5000  lr 0.001000"
    assert lines[lines.index(step) + 1] == "  grad norm 2.000"


def test_json_is_the_only_thing_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    run_through(Console("verbose", json=True))
    out, err = capsys.readouterr()
    assert json.loads(out) == SUMMARY | {"final": {"test_accuracy": 0.975, "test_loss": "NaN"}}
    assert "noted" in err
    assert "fingerprint" not in err


def test_json_of_a_silent_rank_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run_through(Console("silent", json=True))
    assert capsys.readouterr() == ("", "")


def test_letters_that_the_stream_cannot_show_do_not_stop_a_run() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console("normal", stream).plan(ROWS)
    assert b"2 ? CPU" in raw.getvalue()


def test_a_reader_that_leaves_does_not_stop_a_run() -> None:
    code = """
        import sys
        from multigpu_cli.monitor.console import Console
        console = Console()
        for step in range(20_000):
            console.note("x" * 100)
        print("a plug-in speaks")
        print("still there", file=sys.stderr)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdout.readline()
        writer.stdout.close()
        assert writer.stderr.read() == b"still there\n"
    assert writer.returncode == 0


def on_terminal(columns: int, environment: dict[str, str]) -> str:
    """What a terminal of so many columns gets to see of the same run."""
    here = Path(__file__).resolve()
    code = f"import sys; sys.path[:0] = [{str(here.parents[2])!r}, {str(here.parent)!r}]\n" + textwrap.dedent("""
        import time, test_console
        from multigpu_cli.monitor.console import Console
        console = Console()
        test_console.run_through(console)
        progress = console.progress(200)
        for step in range(1, 5):
            time.sleep(0.11)
            progress.update(step, {"loss": 0.25, "samples_per_second": 1234.0})
        console.note("in between")
        progress.close()
        console.note("the end")
    """)
    child = pexpect.spawn(
        sys.executable, ["-c", code], env={"TERM": "xterm-256color"} | environment, dimensions=(24, columns),
        encoding="utf-8", timeout=20,
    )  # fmt: skip
    text: str = child.read()
    child.close()
    assert child.exitstatus == 0, text
    return text


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_gets_a_bar_and_tables_that_fit_it(columns: int) -> None:
    text = on_terminal(columns, {})
    assert "\x1b[2m" in text
    assert not re.search(r"\x1b\[[0-9;]*[34][0-7]m", text), "a colour that some ground swallows"
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    pieces = re.split(r"[\r\n]+", plain)
    assert max(map(len, pieces)) <= columns
    assert any(re.search(r"\| step 4/200, 00:\d\d left, loss 0.2500, 1,234 samples/s$", piece) for piece in pieces)
    assert "step 50/200" not in plain.replace("| step", "")  # no plain line beside the bar
    assert "ab" * 32 in plain
    assert [piece.rstrip() for piece in pieces if re.match(r" +(?:epoch|\d+/10) ", piece)] == [
        "   epoch  train loss  val loss  val accuracy  samples/s   seconds",
        "    9/10      0.6543    0.5000       90.00 %        980       9.9  best",
        "   10/10      0.0512    1.5000      100.00 %     12,346      10.1",
    ]
    label, *_ = [line for line in plain.splitlines() if "2 × CPU" in line]
    assert label.startswith(" device")
    screen = [piece for piece in pieces if piece.strip()]
    assert screen[-1] == "the end"
    assert any(piece.strip() == "in between" for piece in screen)


def test_details_are_folded_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(Console, "_width", lambda console: 40)
    Console("verbose", stream).detail("  " + "  ".join(["grad norm 2.000"] * 5))
    assert stream.getvalue().splitlines() == ["  grad norm 2.000  grad norm 2.000"] * 2 + ["  grad norm 2.000"]


def test_no_terminal_of_letters_alone_gets_codes() -> None:
    assert "\x1b" not in on_terminal(80, {"TERM": "dumb"}).replace("\x1b[A", "")
