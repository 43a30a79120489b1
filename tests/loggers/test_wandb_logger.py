"""W&B for real: offline, with its files read back; and beside a server that accepts and never answers."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.loggers.sender import LoggerProcess, identify_run, list_unsent
from tests.commands.runs import interrupted_run
from tests.support.wandb_files import read_records

ROOT = Path(__file__).resolve().parents[2]
RUN = Path("run")


def find_folder() -> Path:
    (folder,) = (RUN / "loggers" / "wandb").glob("offline-run-*")
    return folder


def read_history() -> list[dict[str, Any]]:
    (file,) = find_folder().glob("*.wandb")
    rows = [record.history.item for record in read_records(file) if record.WhichOneof("record_type") == "history"]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row} for row in rows]


def read_one(kind: str) -> list[Any]:
    (file,) = find_folder().glob("*.wandb")
    return [getattr(record, kind) for record in read_records(file) if record.WhichOneof("record_type") == kind]


@pytest.mark.usefixtures("in_tmp_path")
def test_offline_files_hold_the_whole_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "5ec3e7" * 7)
    interrupted_run(RUN, seed=7)
    checkpoint = RUN / "checkpoints" / "step_00000040"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.pt").write_bytes(b"x")
    manifest = {"step": 40, "files": {"state.pt": {"size": 1, "sha256": "cd" * 32}}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    notes: list[str] = []
    LoggerProcess(RUN, ["wandb"], 240, notes.append, replay=True).close()
    assert (notes, list_unsent(RUN, ["wandb"])) == ([], [])
    rows = read_history()
    trained = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in trained] == list(range(1, 41)), "no step twice, though two were trained twice"
    assert [row["train/loss"] for row in trained] == [pytest.approx(2 / step) for step in range(1, 41)]
    lines = [row["_step"] for row in rows]
    assert lines == sorted(set(lines)), "W&B's own counter only rises"
    identity = identify_run(RUN)
    assert identity
    (run,) = {(each.run_id, each.display_name) for each in read_one("run")}
    assert run == (identity.id, "run")
    assert {(metric.glob_name, metric.step_metric) for metric in read_one("metric")} >= {("*", "step")}
    settings = {entry.key: entry.value_json for record in read_one("config") for entry in record.update}
    assert settings["seed"] == "7"
    (weights,) = read_one("artifact")
    assert json.loads(weights.metadata) == {"sha256": {"checkpoints/step_00000040/state.pt": "cd" * 32}}
    assert [entry.ref.startswith("file:///") for entry in weights.manifest.contents] == [True], "and no bytes of it"
    assert read_one("exit")[0].exit_code == 0
    kept = b"".join(file.read_bytes() for file in RUN.rglob("*") if file.is_file())
    assert b"5ec3e7" not in kept, "the key stays in the environment"

    older = find_folder()
    older = older.rename(older.with_name(f"offline-run-20200101_000000-{identity.id}"))
    LoggerProcess(RUN, ["wandb"], 240, notes.append, replay=True).close()
    assert find_folder() != older, "the new folder has everything, so the one before is gone"
    assert [(row["step"], row.get("train/loss")) for row in read_history()] == [
        (row["step"], row.get("train/loss")) for row in rows
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_a_server_that_never_answers_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_run(RUN, seed=7)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "5ec3e7" * 6 + "5ec3")
        notes: list[str] = []
        process = LoggerProcess(RUN, ["wandb"], 3.0, notes.append)
        process({"event": "end", "time": 1.0, "status": "completed"})
        process.close()
    assert "not sent" in notes[-1]
    assert "multigpu log run --to wandb sends them" in notes[-1]
    assert b"5ec3e7" not in b"".join(file.read_bytes() for file in RUN.rglob("*") if file.is_file())
