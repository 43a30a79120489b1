"""The page's data over HTTP: who gets it, what a run's state is, and journals that grow, break off or are long."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from base64 import b64encode
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import main_multi_gpu
from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.checkpoint.manifest import sign_manifest
from multigpu_cli.watch import runs as watched
from multigpu_cli.watch import view as view_module
from multigpu_cli.watch.runs import WatchedRuns
from multigpu_cli.watch.server import PageServer
from multigpu_cli.watch.view import list_runs, show_runs
from tests.commands.runs import PLAN, event, interrupted_run, lines, run_folder
from tests.tune.studies import make_study, make_trials
from tests.watch.pages import ask, list_by_name, request, serving, view

HERE = os.uname().nodename
GONE = 2**22 + 1  # above the greatest process id there is


def owned(folder: Path, owner: str, *more: Any, **told: Any) -> Path:
    """A run of 12 steps that has not ended, whose lock names this owner."""
    begun = time.time() - 12
    run = run_folder(
        folder, [event(begun, "start", plan=PLAN, host=owner.partition(" ")[0]), *lines(1, 12, begun), *more]
    )
    (run / ".lock").write_text(owner)
    if told:
        (run / "logs").mkdir()
        (run / "logs/state.json").write_text(json.dumps({"time": time.time(), "step": 12} | told))
    return run


def test_only_this_machine_with_the_token_is_answered(tmp_path: Path) -> None:
    interrupted_run(tmp_path / "a")
    with serving(tmp_path) as server:
        token, port = f"token={server.token}", server.server_address[1]
        assert server.server_address[0] == "127.0.0.1"
        assert len(server.token) >= 32
        for host in ("127.0.0.1", f"localhost:{port}", "[::1]:80", "127.0.0.1:1"):  # a tunnel has a port of its own
            assert request(server, f"/?{token}", Host=host).status == 200
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io:80", "", "a@localhost", "[::2]"):
            assert request(server, f"/runs?{token}", Host=host).status == 403
        assert request(server, f"/runs?{token}").status == 403
        for wrong in ("", "token=", f"{token}x", token[:-1], "token=%C3%A9", f"{token[:-1]}%00"):
            answer = request(server, f"/runs?{wrong}", Host="localhost")
            assert (answer.status, b"token" in answer.body) == (403, True)
        assert request(server, "/", Host="localhost").status == 403
        for path in ("/../etc/passwd", "/a/journal.jsonl", "/favicon.ico", "/page.js", "/runs/"):
            assert request(server, f"{path}?{token}", Host="localhost").status == 404
        assert request(server, "http://[x/runs").status == 403  # no address at all
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert request(server, f"/runs?{token}", method=method, Host="localhost").status == 501
        assert ask(server, "/view?run=../../etc") == {"error": "../../etc: no such run"}
        assert "1 to 5" in ask(server, "/view?" + "run=a&" * 6)["error"]


def test_the_page_runs_its_own_script_and_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        answer = request(server, f"/?token={server.token}", Host="localhost")
        page, policy = answer.body.decode(), answer.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert f"{tag}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in policy
    assert re.findall(r"(?:src|href)=\"(?!data:|#)|url\(|@import|innerHTML|outerHTML|document\.write", page) == []
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert len(re.findall(".*\n", (Path(watched.__file__).parent / "page.js").read_text())) <= 400


def test_a_state_is_what_can_be_known(tmp_path: Path) -> None:
    """From the lock, the process and the journal: dead only if the process is gone."""
    owned(tmp_path / "dead", f"{HERE} {GONE}", phase="saving", pid=GONE, host=HERE)
    owned(tmp_path / "elsewhere", "node7 5")
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    owned(tmp_path / "releasing", f"{HERE} 5", phase="ending", pid=os.getpid(), started=started)
    owned(tmp_path / "reused", f"{HERE} 5", phase="ending", pid=os.getpid(), started=1)
    owned(tmp_path / "without _proc", f"{HERE} {GONE}", phase="ending", pid=GONE, started=None)
    lost = {"pid": GONE, "host": HERE, "launcher": os.getpid()}
    owned(tmp_path / "restarting", f"{HERE} {GONE}", launcher_started=started, **lost)
    owned(tmp_path / "with its launcher", f"{HERE} {GONE}", launcher_started=1, **lost)
    failure = event(time.time(), "end", status="failed", step=12)
    owned(tmp_path / "failed, restarting", f"{HERE} {GONE}", failure, launcher_started=started, **lost)
    interrupted_run(tmp_path / "completed")
    for status in ("stopped", "failed"):
        owned(tmp_path / status, f"{HERE} {GONE}", failure | {"status": status, "cause": "OutOfMemory: too much"})
    owned(tmp_path / "without reason", f"{HERE} {GONE}", failure)
    run_folder(tmp_path / "copy", [event(1, "start", plan=PLAN), *lines(1, 2, 1)])
    with serving(tmp_path) as server:
        found = list_by_name(server)
        states = {name: row["phase"] for name, row in found.items()}
        assert states == {
            **{name: name for name in ("dead", "completed", "stopped", "failed", "restarting")},
            "failed, restarting": "restarting",
            "with its launcher": "dead",
            "elsewhere": "unknown",
            "copy": "unknown",
            "releasing": "ending",
            **dict.fromkeys(("reused", "without _proc"), "dead"),
            "without reason": "failed",
        }
        assert (found["dead"]["state"], found["dead"]["detail"]) == ("died", f"process {GONE} on {HERE} is gone")
        assert "can't be seen from this machine" in found["elsewhere"]["detail"]
        assert found["failed"]["alarms"][-1] == "failed at step 12: OutOfMemory: too much"
        assert found["without reason"]["alarms"] == ["failed at step 12: summary.json says why"]
        assert found["dead"]["end"] is None


@pytest.mark.parametrize("phase", [None, "starting", "training", "evaluating", "saving"])
def test_the_phase_of_a_run_at_work(tmp_path: Path, phase: str | None) -> None:
    told = {} if phase is None else {"phase": phase, "pid": os.getpid(), "host": HERE}
    folder = owned(tmp_path / "a", "", **told)
    with lock_folder(folder), serving(folder) as server:
        (row,) = ask(server, "/runs")["runs"]
        assert (row["phase"], row["detail"]) == (phase or "training", f"process {os.getpid()} on {HERE}")
        assert 0 <= row["silent_seconds"] < 10
        expected, low, high = row["end"]
        assert low <= expected <= high
        assert 20 < expected < 30  # 28 steps of a second
        assert row["next"][0] == 16


def test_a_process_that_can_not_be_seen_is_in_doubt_and_a_suspended_one_is_named(tmp_path: Path) -> None:
    """In another container; and one that holds the lock, but is stopped by SIGSTOP."""
    code = "import sys, time; from multigpu_cli.checkpoint.files import lock_folder; from pathlib import Path\n"
    code += "with lock_folder(Path(sys.argv[1])): print(); sys.stdout.flush(); time.sleep(60)"
    folder = owned(tmp_path / "a", "")
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder, serving(tmp_path) as server:
        try:
            assert holder.stdout
            holder.stdout.readline()
            holder.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 20
            while "suspended" not in list_by_name(server)["a"]["detail"]:
                assert time.monotonic() < deadline
            (folder / ".lock").write_text(f"{HERE} {GONE}")
            assert list_by_name(server)["a"]["phase"] == "training"
            begun = time.time() - 100
            earlier = run_folder(tmp_path / "earlier", [event(begun, "start", plan=PLAN), *lines(1, 12, begun)])
            (earlier / "journal.jsonl").replace(folder / "journal.jsonl")
            assert list_by_name(server)["a"]["phase"] == "unknown"
        finally:
            holder.kill()
            holder.wait()
        assert list_by_name(server)["a"]["phase"] == "dead"


def test_a_journal_that_breaks_off_grows_is_replayed_and_begins_anew(tmp_path: Path) -> None:
    folder = interrupted_run(tmp_path / "a")
    journal = folder / "journal.jsonl"
    whole = journal.read_text().splitlines(keepends=True)
    resumed = next(at for at, line in enumerate(whole) if '"resume"' in line)
    journal.write_text("".join(whole[: resumed - 1]) + '{"event": "train", "ti')
    with serving(tmp_path) as server:
        before = view(server, "a")
        assert (before["runs"][0]["step"], before["marks"]) == (24, [])
        assert "plots" not in view(server, "a", known=before["version"].replace(" ", "%20"))
        journal.write_text("".join(whole))
        after = view(server, "a")
        (loss, _) = after["plots"][0]["lines"]
        assert loss["series"][0] == list(range(1, 41))
        assert (loss["series"][1][22], after["runs"][0]["step"]) == (float(f"{2 / 23:.6g}"), 40)
        assert [(mark["at"], mark["kind"]) for mark in after["marks"]] == [(22, "resize"), (30, "fault")]
        assert after["marks"][0]["text"] == "a: 2 → 1 workers after step 22"
        journal.unlink()
        run_folder(tmp_path / "b", [event(5, "start", plan=PLAN), *lines(1, 3, 5)])
        (tmp_path / "b/journal.jsonl").rename(journal)
        assert view(server, "a")["runs"][0]["step"] == 3
        longer = run_folder(tmp_path / "c", [event(7, "start", plan=PLAN | {"workers": 3}), *lines(1, 12, 7)])
        with journal.open("r+") as same_inode:  # as a new file has that replaces a removed one
            same_inode.write((longer / "journal.jsonl").read_text())
        assert [view(server, "a")["runs"][0][name] for name in ("step", "workers", "attempts")] == [12, 3, 1]


def test_a_long_journal_shows_its_end_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_NEWEST", 20_000)
    ends = [event(2000, "start", plan=PLAN | {"workers": 3}, resumed_from="x"), event(2000, "resume", step=900)]
    folder = run_folder(
        tmp_path / "a", [event(0, "start", plan=PLAN), *lines(1, 1000, 0, lr=0.3), *ends, *lines(901, 2000, 2000)]
    )
    runs = WatchedRuns([str(tmp_path)])
    (key,) = runs.runs
    (row,) = list_runs(WatchedRuns([str(tmp_path)]), 60)["runs"]
    assert (row["step"], row["attempts"], row["workers"]) == (2000, 2, 3)
    first = show_runs(runs, [key], "", 0.0)
    assert first["share"] == 0.0
    assert first["runs"][0]["step"] == 2000
    assert 1 < len(first["plots"][0]["lines"][0]["series"][0]) < 200
    with (folder / "journal.jsonl").open("a") as journal:
        journal.write("".join(json.dumps(each) + "\n" for each in lines(2001, 2002, 4000)))
    shares = [0.0]
    while shares[-1] < 1:
        shown = show_runs(runs, [key], "", 1e-6)
        assert shown["runs"][0]["step"] == 2002
        shares.append(shown["share"])
    assert shares == sorted(shares)
    assert len(shares) > 10
    fresh = WatchedRuns([str(tmp_path)])
    fresh.runs[key].advance(60)
    assert show_runs(fresh, [key], "", 60)["plots"] == shown["plots"]
    assert shown["runs"][0]["workers"] == 3
    assert shown["marks"][0]["kind"] == "resize"
    steps = shown["plots"][0]["lines"][0]["series"][0]
    assert (steps[0], steps[-1]) == (1, 2002)
    assert 600 < len(steps) <= 810
    plan = {
        row[0]: row[1] for table in shown["tables"] if table["title"] == "Plan against reality" for row in table["rows"]
    }
    assert plan["greatest learning rate, of the steps logged"] == ["0.1", "0.3"]


def test_each_run_has_its_turn_where_the_time_does_not_suffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        run_folder(tmp_path / name, [event(1, "start", plan=PLAN), *lines(1, 2, 1)])
    runs, clock = WatchedRuns([str(tmp_path)]), count()
    monkeypatch.setattr(view_module, "time", SimpleNamespace(time=time.time, monotonic=lambda: next(clock)))
    for _ in range(3):
        list_runs(runs, 1.5)  # enough for one
    for name in ("a", "b", "c"):
        with (tmp_path / name / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps(event(4, "train", step=3)) + "\n")
    shown = [sorted(row["step"] for row in list_runs(runs, 1.5)["runs"]) for _ in range(3)]
    assert shown == [[2, 2, 3], [2, 3, 3], [3, 3, 3]]


@pytest.mark.filterwarnings("ignore:.* damaged, and not used")
def test_nothing_outside_of_the_named_folders_is_read(tmp_path: Path) -> None:
    interrupted_run(tmp_path / "private/run")
    home = interrupted_run(tmp_path / "shared/own").parent
    (home / "link").symlink_to(tmp_path / "private/run")
    interrupted_run(home / "half")
    (home / "half/summary.json").unlink()
    (home / "half/summary.json").symlink_to(tmp_path / "private/run/summary.json")
    (home / "again").symlink_to(home / "own")
    (home / "own/summary.json").unlink()
    (home / "own/summary.json").symlink_to("summary.json")  # leads to itself
    interrupted_run(home / "locked")
    (home / "locked/.lock").symlink_to(tmp_path / "private/run/journal.jsonl")
    with serving(home) as server:
        assert sorted(list_by_name(server)) == ["again", "own"]


@pytest.mark.filterwarnings("ignore:.* damaged, and not used")
def test_any_name_and_any_journal_is_shown(tmp_path: Path) -> None:
    """Names of any bytes; a journal that has no sense leaves the other runs alone."""
    interrupted_run(tmp_path / os.fsdecode(b"\xff<b>") / "a")
    run_folder(tmp_path / "broken", [event(1, "start", plan=[]), event(2, "train", step="x")])
    (tmp_path / "folder/journal.jsonl").mkdir(parents=True)
    deep = run_folder(tmp_path / "deep", [event(1, "start", plan=PLAN), *lines(1, 3, 1)]) / "journal.jsonl"
    deep.write_text(deep.read_text() + '{"event": "fault", "time": 3, "kind": ' + "[" * 2000 + "]" * 2000 + "}\n")
    scarce = [event(1, "start", plan={"samples": 9}), event(2, "eval", step=1, split="val", loss=1.0, auc=None)]
    run_folder(tmp_path / "scarce", [*scarce, event(3, "eval", step=2, split="val", loss=1.0, auc=0.5)])
    with serving(tmp_path) as server:
        found = list_by_name(server)
        assert found.pop("deep")["phase"] == "unknown", "a line that is nested too deep is none"
        shown = view(server, "scarce")
        assert [plot["name"] for plot in shown["plots"]] == ["loss", "val_auc"]
        assert shown["tables"][1]["rows"][0] == ["+ 0 s", ["attempt 1 starts: unknown"]]
        del found["scarce"]
        assert found.pop("broken")["phase"] == "unknown", "no line of it is an event"
        (name,) = found  # a journal is a file
        assert view(server, name)["runs"][0]["name"] == "\udcff<b>/a"


def test_runs_are_compared_and_verified(tmp_path: Path) -> None:
    names = {"a": {}, "b": {}, "c": {"lr": 0.3, "seed": 7}}
    for name, settings in names.items():
        interrupted_run(tmp_path / name, **settings)
    with serving(*(tmp_path / name for name in names)) as server:
        rows = list_by_name(server)
        shown = view(server, *rows)
    tables = {table["title"]: table for table in shown["tables"]}
    differing = tables["Settings that differ"]
    (lr,) = [cells for name, cells in differing["rows"] if name == "lr"]
    assert sorted(lr[:3]) == ["", "", "0.3"]
    assert len(shown["verified"]) == 1
    assert "verified equal" in shown["verified"][0]
    assert {line["label"] for line in shown["plots"][0]["lines"] if line["label"]} == set(rows)
    assert len({line["color"] for line in shown["plots"][1]["lines"]}) == 3


def test_checkpoints_are_checked(tmp_path: Path) -> None:
    folder = interrupted_run(tmp_path / "a")
    step = folder / "checkpoints/step_00000022"
    step.mkdir(parents=True)
    (step / "state.pt").write_bytes(b"weights")
    listed = {"size": 7, "sha256": sha256(b"weights").hexdigest()}
    (step / "manifest.json").write_bytes(sign_manifest({"step": 22, "files": {"state.pt": listed}}))
    with serving(tmp_path) as server:
        ((row,),) = view(server, "a")["checkpoints"]
        assert (row["name"], row["damage"], row["bytes"]) == (step.name, None, 7)
        address = f"/check?run={list_by_name(server)['a']['id']}&checkpoint="
        assert ask(server, address + step.name) == {"damage": None}
        (step / "state.pt").write_bytes(b"wrights")
        assert "checksum" in ask(server, address + step.name)["damage"]
        assert "no such checkpoint" in ask(server, address + "../..")["error"]


def test_a_study(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    make_study(rungs=[1, 3], search={"lr": "log(1e-4,1e-1)"}).write(tmp_path / "study")
    for trial in make_trials((0, "paused", 0.5), (1, "completed", 0.9), (0, "waiting", None)):
        trial.params = {"lr": 0.01 * (trial.number + 1)}
        trial.write(tmp_path / "study")
    for file in interrupted_run(tmp_path / "run").iterdir():
        file.rename(tmp_path / "study/trials/0001" / file.name)
    with serving(tmp_path) as server:
        (study,) = ask(server, "/runs")["studies"]
        shown = ask(server, f"/study?id={study['id']}")
        (table,) = shown["tables"]
        assert table["rows"][0] == ["trial 1", ["best", "completed", "1", "0.9", "0.02"]]
        (run,) = ask(server, "/runs")["runs"]
        assert shown["links"]["trial 1"] == run["id"]
        assert shown["plots"][0]["lines"][-1]["label"] == "trial 1"
        assert ask(server, "/study?id=x") == {"error": "x: no such study"}


def test_the_page_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted_run(tmp_path / "runs/a")
    interrupted_run(tmp_path / "runs/<script>alert(1)</script>", lr=0.3)
    odd = event(5, "end", status="completed")  # without a step, which the list does not show, but a table does
    run_folder(tmp_path / "runs/odd", [event(1, "start", plan=PLAN), *lines(1, 3, 1), odd])
    file = tmp_path / "page.html"
    assert main_multi_gpu.run(["watch", str(tmp_path / "runs"), "--export", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    page = file.read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    kept = json.loads(data)
    assert "<" not in data
    ids = {row["name"]: row["id"] for row in kept["runs"]["runs"]}
    views = {f"view?run={each}" for each in ids.values()}
    assert set(kept) == {"runs", "saved", *views, "view?" + "&".join(f"run={each}" for each in ids.values())}
    assert kept["saved"].startswith(time.strftime("%Y-"))
    assert "completed at step None" in str(kept[f"view?run={ids['odd']}"])
    with serving(tmp_path / "runs") as server:
        live = ask(server, f"/view?run={ids['a']}")
    assert live["plots"] == kept[f"view?run={ids['a']}"]["plots"]
    assert "Content-Security-Policy" in page


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    interrupted_run(tmp_path / "a")
    command = [sys.executable, main_multi_gpu.__file__, "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            address, tunnel = process.stdout.readline(), process.stdout.readline()
            with urllib.request.urlopen(address.strip().replace("/?", "/runs?"), timeout=60) as answer:
                assert [row["name"] for row in json.load(answer)["runs"]] == ["a"]
            port = address.split(":")[2].partition("/")[0]
            assert f"ssh -N -L {port}:127.0.0.1:{port} " in tunnel
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == -signal.SIGINT


def test_wrong_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PageServer(WatchedRuns([str(tmp_path)]), 0) as taken:
        for arguments, said in (
            (["watch", str(tmp_path / "x")], "no such folder"),
            (["watch", str(tmp_path), "--port", "x"], "--port"),
            (["watch", str(tmp_path), "--port", str(taken.server_address[1])], "in use"),
            (["watch", str(tmp_path), "--export", str(tmp_path / "x/page.html")], "--export"),
        ):
            assert main_multi_gpu.run(arguments) == 2
            assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
