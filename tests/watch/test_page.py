"""The page as a browser shows it, read from its DOM."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from multigpu_cli.monitor.history import load_history
from multigpu_cli.watch.runs import WatchedRuns
from multigpu_cli.watch.server import PageServer, export_page
from tests.commands.runs import PLAN, event, interrupted_run, lines, run_folder
from tests.support.browser import read_dom
from tests.watch.pages import list_by_name, serving

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.browser, pytest.mark.slow]


def look(server: PageServer, folder: Path, place: str = "", token: str | None = None) -> str:
    address = f"http://127.0.0.1:{server.server_address[1]}/?token={server.token if token is None else token}{place}"
    return read_dom(address, folder)


def place_of(server: PageServer, *names: str) -> str:
    rows = list_by_name(server)
    return "#/run/" + ",".join(rows[name]["id"] for name in names)


def text_of(page: str) -> str:
    """What people read of it."""
    body = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", " ", body))


def test_the_list_of_runs(tmp_path: Path) -> None:
    """A dead run, a torn last line, and a name that would be markup: it is text."""
    dead = interrupted_run(tmp_path / "runs/dead")
    begun = time.time() - 50
    (dead / "journal.jsonl").unlink()
    torn = run_folder(tmp_path / "runs/torn", [event(begun, "start", plan=PLAN, host="x"), *lines(1, 9, begun)])
    with (torn / "journal.jsonl").open("a") as journal:
        journal.write('{"event": "train", "step": 10, "lo')
    (torn / "journal.jsonl").rename(dead / "journal.jsonl")
    (dead / "summary.json").unlink()
    (dead / ".lock").write_text(f"{os.uname().nodename} {2**22 + 1}")
    interrupted_run(tmp_path / "runs/<img src=x onerror=document.title='owned'>")
    with serving(tmp_path / "runs") as server:
        page = look(server, tmp_path)
        assert '<div class="row" data-run="dead" data-phase="dead">' in page
        assert "9 / 40" in text_of(page)
        assert "<img src=x onerror=document.title='owned'>" in text_of(page)
        assert "<img" not in page
        assert "<title>multigpu watch</title>" in page
        assert "data-run" not in look(server, tmp_path, token="wrong")
        assert "the token is missing or wrong" in text_of(look(server, tmp_path, token=""))
        foreign = f"http://evil.example:{server.server_address[1]}/?token={server.token}"
        rebound = read_dom(foreign, tmp_path, "--host-resolver-rules=MAP evil.example 127.0.0.1")
        assert "the Host of the request is not this machine" in rebound


def test_two_runs_and_their_difference(tmp_path: Path) -> None:
    names = ("a", "b")
    for at, name in enumerate(names):
        interrupted_run(tmp_path / "runs" / name, lr=0.1 + at)
    with serving(tmp_path / "runs") as server:
        page = look(server, tmp_path, place_of(server, *names))
    assert page.count('data-phase="completed"') == 2
    (table,) = re.findall(r"Settings that differ</summary>.*?</table>", page)
    assert re.findall(r"<th>lr</th><td>(.*?)</td><td>(.*?)</td>", table) == [("0.1", "1.1")]
    (loss,) = re.findall(r'<figure[^>]*data-plot="loss">.*?</figure>', page)
    assert loss.count('<path class="curve"') == 4
    assert loss.count('class="mark resize"') == 2


def test_a_file_shows_the_same_page(tmp_path: Path) -> None:
    interrupted_run(tmp_path / "runs/a")
    file = export_page(WatchedRuns([str(tmp_path / "runs")]), str(tmp_path / "page.html"))
    with serving(tmp_path / "runs") as server:
        place = place_of(server, "a")
        live = look(server, tmp_path, place)
    kept = read_dom(f"{file.as_uri()}{place}", tmp_path)
    parts = [re.findall(r"<figure.*?</figure>", page) for page in (live, kept)]
    assert len(parts[0]) > 5
    assert parts[0] == parts[1]
    assert "saved page" in text_of(kept)
    assert 'data-run="a"' in read_dom(file.as_uri(), tmp_path)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_that_is_killed_and_resumed_on_another_number_of_workers(tmp_path: Path) -> None:
    run = tmp_path / "runs/a"
    flags = "--global-batch-size 32 --batch-size 16 --max-steps 300 --checkpoint-every 20 --log-interval 1"
    command = [sys.executable, str(ROOT / "main_multi_gpu.py"), *flags.split(), "--num-workers", "0", "--quiet"]
    command += ["--save-dir", str(run), "--multi-gpu"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}

    def step() -> int:
        return load_history(run).step if (run / "journal.jsonl").exists() else 0

    with subprocess.Popen([*command, "ddp", "--nproc-per-node", "2"], env=environ, start_new_session=True) as first:
        wait_until(lambda: step() > 45)
        with serving(tmp_path / "runs") as server:
            page = look(server, tmp_path)
            assert re.search('data-run="a" data-phase="(training|saving|evaluating)"', page)
        os.killpg(first.pid, signal.SIGKILL)
    with serving(tmp_path / "runs") as server:
        wait_until(lambda: list_by_name(server)["a"]["phase"] == "dead")
        before = load_history(run).step
        assert 'data-phase="dead"' in look(server, tmp_path)
        subprocess.run([*command, "none"], env=environ, check=True)
        page = look(server, tmp_path, place_of(server, "a"))
    assert 'data-phase="completed"' in page
    assert "2 → 1 workers after step" in text_of(page)
    assert "attempt 2" in text_of(page)
    resumed = load_history(run).attempts[1].resumed_at
    assert 40 <= resumed <= before
    (loss,) = re.findall(r'<figure[^>]*data-plot="loss">.*?</figure>', page)
    marks = re.findall(r'class="mark resize" x1="([\d.]+)"', loss)
    assert len(marks) == 1
    assert float(marks[0]) == pytest.approx(52 + (resumed - 1) / 299 * (1200 - 60), abs=0.2)
