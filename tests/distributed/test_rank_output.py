"""What ranks other than 0 print: into their own files while a run is on, back on the terminal when it ends."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from multigpu_cli.distributed.processes import (
    RankOutput,
    find_ranks_with_output,
    log_path,
    quote_last_lines,
    read_last_lines,
)
from tests.config.test_regular_files import within_seconds

ROOT = Path(__file__).resolve().parents[2]
SPEAK = """
    import ctypes, os, resource, signal, sys
    from pathlib import Path
    from multigpu_cli.distributed.processes import RankOutput

    libc, early = ctypes.CDLL(None), sys.stdout
    def speak(when):
        print("out", when)
        print("err", when, file=sys.stderr)
        os.write(1, f"descriptor {when}\\n".encode())
        libc.printf(b"C %s\\n", when.encode())
        early.write(f"early {when}\\n")
"""


def run_code(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a piece of code in a process of its own, which knows how to speak."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SPEAK) + textwrap.dedent(code)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_all_that_is_printed_meanwhile_is_in_the_file_and_the_rest_where_it_was(tmp_path: Path) -> None:
    done = run_code(
        tmp_path,
        """
        for attempt in (0, 1):
            with RankOutput(3) as rank_output:
                speak("before")
                rank_output.start(Path(), attempt)
                speak("meanwhile")
                print("letters: \\udcff ä")
            speak("after")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        [f"{who} {when}" for who in ("out", "descriptor", "C", "early") for when in ("before", "after")] * 2
    )
    assert done.stderr == "err before\nerr after\n" * 2
    first, *lines = log_path(tmp_path, 3).read_text().splitlines()
    assert first.startswith("--- rank 3, attempt 1, 20")
    half = len(lines) // 2
    assert lines[half].startswith("--- rank 3, attempt 2, 20"), "restarts append"
    wanted = ["C meanwhile", "descriptor meanwhile", "early meanwhile", "err meanwhile", "letters: \\udcff ä"]
    assert sorted(lines[:half]) == sorted(lines[half + 1 :]) == [*wanted, "out meanwhile"]


def test_a_killed_process_has_left_its_last_words(tmp_path: Path) -> None:
    done = run_code(
        tmp_path,
        """
        RankOutput(1).start(Path(), 0)
        for number in range(9):
            print("line", number, flush=False)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert (done.returncode, done.stdout) == (-9, "")
    assert read_last_lines(tmp_path, 1, 2) == ["line 7", "line 8"]
    assert quote_last_lines(tmp_path, 1).splitlines() == [
        "", f"  its last output ({tmp_path}/rank_1.log):", *(f"  line {number}" for number in range(5, 9))
    ]  # fmt: skip
    assert find_ranks_with_output(tmp_path, 8) == [1]


def test_nothing_said_is_nothing_to_quote(tmp_path: Path) -> None:
    run_code(
        tmp_path,
        "with RankOutput(1) as output: print('of an earlier attempt', output.start(Path(), 0) or '')",
    )
    run_code(tmp_path, "with RankOutput(1) as rank_output: rank_output.start(Path(), 1)")
    assert log_path(tmp_path, 1).read_text().count("--- rank 1, attempt ") == 2
    assert read_last_lines(tmp_path, 1) == []
    assert quote_last_lines(tmp_path, 1) == quote_last_lines(tmp_path, 2) == quote_last_lines(None, 1) == ""
    assert find_ranks_with_output(tmp_path, 8) == []


def test_where_no_file_can_be_opened_nothing_changes(tmp_path: Path) -> None:
    done = run_code(
        tmp_path, "with RankOutput(1) as rank_output:\n    rank_output.start(Path('nowhere'), 0)\n    print('heard')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trap", ["fifo", "link"])
def test_rank_log_that_is_a_link_or_fifo_is_not_used(trap: str, tmp_path: Path) -> None:
    secret, log = tmp_path / "secret", log_path(tmp_path, 1)
    secret.write_text("a secret\n")
    os.mkfifo(log) if trap == "fifo" else log.symlink_to(secret)
    with within_seconds(20):
        assert read_last_lines(tmp_path, 1) == []
        with RankOutput(1) as rank_output:
            rank_output.start(tmp_path, 0)
            assert rank_output._before is None, "output is redirected"
    assert secret.read_text() == "a secret\n"


def test_what_a_full_disk_does_not_take_stays_on_the_terminal(tmp_path: Path) -> None:
    done = run_code(
        tmp_path,
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with RankOutput(1) as rank_output:
            rank_output.start(Path(), 0)
            print("in the file")
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (Path("rank_1.log").stat().st_size, before[1]))
            print("on the terminal")
        resource.setrlimit(resource.RLIMIT_FSIZE, before)  # coverage writes its figures at the end
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "on the terminal\n", "")
    assert read_last_lines(tmp_path, 1) == ["in the file"]
