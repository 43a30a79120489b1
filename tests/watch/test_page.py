"""The page as a browser shows it, read from its DOM."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from html import unescape
from pathlib import Path
from queue import Queue
from statistics import median
from typing import Any

import pytest

from multigpu_cli.checkpoint.manifest import sign_manifest
from multigpu_cli.monitor.history import load_history
from multigpu_cli.watch import server as server_module
from multigpu_cli.watch.runs import WatchedRuns
from multigpu_cli.watch.server import PageServer, export_page
from tests.commands.runs import PLAN, event, interrupted_run, lines, run_folder
from tests.support.browser import browsing, read_dom
from tests.watch.pages import list_by_name, serving

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.browser, pytest.mark.slow]


def look(server: PageServer, folder: Path, place: str = "", token: str | None = None) -> str:
    return read_dom(address_of(server, place, token), folder)


def address_of(server: PageServer, place: str = "", token: str | None = None) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/?token={server.token if token is None else token}{place}"


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
    begun, long = time.time() - 50, PLAN | {"total_steps": 2_000_000}
    (dead / "journal.jsonl").unlink()
    torn = run_folder(tmp_path / "runs/torn", [event(begun, "start", plan=long, host="x"), *lines(1, 9, begun)])
    with (torn / "journal.jsonl").open("a") as journal:
        journal.write('{"event": "train", "step": 10, "lo')
    (torn / "journal.jsonl").rename(dead / "journal.jsonl")
    (dead / "summary.json").unlink()
    (dead / ".lock").write_text(f"{os.uname().nodename} {2**22 + 1}")
    interrupted_run(tmp_path / "runs/<img src=x onerror=document.title='owned'>")
    with serving(tmp_path / "runs") as server:
        page = look(server, tmp_path)
        assert '<div class="row" data-run="dead" data-phase="dead">' in page
        assert "9 / 2,000,000" in text_of(page)
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


def test_a_file_shows_the_same_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_run(tmp_path / "runs/a")
    file = export_page(WatchedRuns([str(tmp_path / "runs")]), str(tmp_path / "page.html"))
    with serving(tmp_path / "runs") as server:
        place = place_of(server, "a")
        live = look(server, tmp_path, place)
    kept = read_dom(f"{file.as_uri()}{place}", tmp_path)
    run_folder(tmp_path / "runs/b", [event(1, "start", plan=PLAN), *lines(1, 3, 1)])
    run_folder(tmp_path / "runs/broken", [event(1, "start", plan=[])])
    act(monkeypatch, "setTimeout(() => document.getElementById('compare').click(), 1000);")
    export_page(WatchedRuns([str(tmp_path / "runs")]), str(file))
    compared = read_dom(file.as_uri(), tmp_path)
    assert compared.count("<section data-run=") == 2
    parts = [re.findall(r"<figure.*?</figure>", page) for page in (live, kept)]
    assert len(parts[0]) > 5
    assert parts[0] == parts[1]
    assert f"saved page of {time.strftime('%Y-')}" in text_of(kept)


def act(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Add to the page's script what a user does; the policy allows it, as it is made of the script."""
    read = server_module._read_part
    monkeypatch.setattr(server_module, "_read_part", lambda name: read(name) + f"{script}\n" * (name == "page.js"))
    monkeypatch.setattr(server_module, "build_policy", server_module.build_policy.__wrapped__)


def test_a_checkpoint_of_a_run_that_has_ended_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is new on such a page. A class has the name of what every object of JavaScript has."""
    run = interrupted_run(tmp_path / "runs/a")
    (run / "summary.json").write_text(json.dumps({"per_class": [{"class": "constructor", "f1": 0.5}]}))
    step = run / "checkpoints/step_00000022"
    step.mkdir(parents=True)
    (step / "manifest.json").write_bytes(sign_manifest({"step": 22, "files": {}}))
    act(monkeypatch, "setTimeout(() => document.querySelector('td button').click(), 1500);")
    with serving(tmp_path / "runs") as server:
        page = look(server, tmp_path, place_of(server, "a"))
    assert "intact: every file matches its SHA-256" in text_of(page)
    assert "<th>constructor</th>" in page


def test_a_state_is_shown_beside_a_curve_that_somebody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that is at work when the page is opened, and dead afterwards."""
    interrupted_run(tmp_path / "runs/a")
    script = """
const ask = get, find = main.querySelector.bind(main);
let asked = 0;
get = async (address) => {
  const found = await ask(address.replace(/&known=.*/, "")); // there is something new each time
  found.runs[0].phase = asked++ ? "dead" : "training";
  return found;
};
main.querySelector = (what) => (what.includes(":hover") ? main : find(what));
"""
    act(monkeypatch, script)
    with serving(tmp_path / "runs") as server:
        page = look(server, tmp_path, place_of(server, "a"))
    assert 'data-run="a" data-phase="dead"' in page
    assert "<title>a: dead</title>" in page


def test_a_server_that_hangs_makes_the_page_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tunnel does that nobody has closed."""
    interrupted_run(tmp_path / "runs/a")
    script = """
const ask = fetch;
let asked = 0;
fetch = (address, options) => asked++ < 2 ? ask(address, options) : new Promise((_, fail) =>
  options?.signal.addEventListener("abort", () => fail(options.signal.reason)));
"""
    act(monkeypatch, script)
    with serving(tmp_path / "runs") as server:
        page = read_dom(address_of(server), tmp_path, wait_ms=24_000)
    assert 'data-run="a"' in page
    assert "no answer" in text_of(page)
    assert '<body class="stale">' in page


def test_a_new_line_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a browser that stays open, twenty times at any moment between two looks; prints how long it took."""
    script = """
let seen = "";
new MutationObserver(() => {
  const [step] = (document.querySelector(".cards b") || { textContent: "" }).textContent.split(" ");
  if (step !== seen) fetch(`/seen?token=${token}&step=${step}&time=${performance.timeOrigin + performance.now()}`);
  seen = step;
}).observe(main, { childList: true, subtree: true });
"""
    act(monkeypatch, script)
    shown, answer = Queue[tuple[int, float]](), server_module.answer

    def note(runs: WatchedRuns, address: str, patience: float) -> dict[str, Any] | None:
        if found := re.search("^seen.*step=([0-9]+)&time=([0-9.]+)", address):
            shown.put((int(found[1]), float(found[2]) / 1e3))
        return answer(runs, address, patience)

    monkeypatch.setattr(server_module, "answer", note)
    run, seconds = run_folder(tmp_path / "runs/a", [event(1, "start", plan=PLAN), *lines(1, 900, 1)]), list[float]()
    with serving(tmp_path / "runs") as server, browsing(address_of(server, place_of(server, "a")), tmp_path):
        assert shown.get(timeout=60)[0] == 900
        for step in range(901, 921):
            time.sleep(1 + random.random())
            began = time.time()
            with (run / "journal.jsonl").open("a") as journal:
                journal.write("".join(json.dumps(each) + "\n" for each in lines(step, step, began)))
            found, at = shown.get(timeout=60)
            seconds.append(at - began)
            assert found == step
    print(f"{median(seconds):.2f} s, at most {max(seconds):.2f} s")


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
    assert "started 2 times" in text_of(page)
    resumed = load_history(run).attempts[1].resumed_at
    assert 40 <= resumed <= before
    (loss,) = re.findall(r'<figure[^>]*data-plot="loss">.*?</figure>', page)
    marks = re.findall(r'class="mark resize" x1="([\d.]+)"', loss)
    assert len(marks) == 1
    assert float(marks[0]) == pytest.approx(52 + (resumed - 1) / 299 * (1200 - 60), abs=0.2)
