"""Run folders that an older version wrote are read and resumed: those of old_runs/, made as its README says."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import main_multi_gpu
from multigpu_cli.commands.verify import compare_runs
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor import journal
from tests.support.run_training import run_training

OLD = Path(__file__).with_name("old_runs")
WORKERS = {"plain": 1, "exact": 2, "ppo": 1}
STOPPED = {"plain": 8, "exact": 30, "ppo": 16}
RUNS = pytest.mark.parametrize("name", WORKERS)
close_to = partial(pytest.approx, rel=1e-3, abs=1e-4)  # on another processor; what a checkpoint lacks costs more


@pytest.fixture(autouse=True)
def _copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")


def read_figures(name: str) -> tuple[Any, Any]:
    """The losses of all steps, and what the evaluations found; those that were repeated count once."""
    events = list(journal.read_events(f"{name}/journal.jsonl"))
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "train"}
    evaluations = {
        (event["step"], event["split"]): event.get("loss", event.get("reward"))
        for event in events
        if event["event"] == "eval"
    }
    return list(losses.values()), list(evaluations.values())


def describe_kernels() -> list[str]:
    """What decides about the last bit of a matrix product."""
    processor = Path("/proc/cpuinfo")
    vendors = re.findall(r"vendor_id\s*: (.*)", processor.read_text() if processor.exists() else "")
    return [torch.__version__, torch.backends.cpu.get_cpu_capability(), *vendors[:1]]


@RUNS
def test_it_ends_as_the_older_version_would_have_ended_it(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    expected = json.loads(Path(f"{name}.json").read_text())
    shutil.copytree(name, "before")
    ended = run_training(WORKERS[name], resume=name, data=None, model=None, multi_gpu=None)
    if name == "exact" and describe_kernels()[1] != expected["kernels"][1]:
        assert "bits would differ" in ended.error  # on another kind of CPU, and nothing was touched
        assert Path(name, "journal.jsonl").read_bytes() == Path("before/journal.jsonl").read_bytes()
        return
    assert (ended.error, ended.summary["status"]) == ("", "completed")
    warned = "--exact: an older version started exact without checksum of products, checksum of convolutions"
    assert (warned in " ".join(capfd.readouterr().out.split())) == (name == "exact")
    assert ended.summary["resumed_from"] == f"{name}/checkpoints/step_{STOPPED[name]:08d}"
    losses, evaluations = read_figures(name)
    assert losses == close_to(expected["losses"])
    assert evaluations == close_to(expected["evaluations"])
    if describe_kernels() == expected["kernels"]:
        assert ended.summary["fingerprint"] == expected["fingerprint"]

    best = expected["best"]
    assert ended.summary["best"] == close_to(best)
    kept = Path(name, "best.pt").read_bytes() == Path("before/best.pt").read_bytes()
    assert kept == (best["step"] <= STOPPED[name])
    with pytest.raises(RequestError, match=r"before has no fingerprint, because it is stopped; so far all .* agree"):
        compare_runs("before", name)


@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("exact", "ppo"))])
def test_every_command_reads_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*words: str) -> Any:
        assert main_multi_gpu.run([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    (status,) = answer("status", name)
    assert (status["state"], status["step"], status["checkpoint_step"]) == ("stopped", STOPPED[name], STOPPED[name])
    assert Path(answer("report", name)["page"]).is_file()
    listed = answer("checkpoints", name)
    assert listed["healthy"]
    assert [entry["step"] for entry in listed["checkpoints"] if entry["resumes"]] == [STOPPED[name]]
    first_val = json.loads(Path(f"{name}.json").read_text())["evaluations"][0]
    found = answer("evaluate", name, "--split", "val")
    assert found.get("loss", found.get("reward")) == close_to(first_val)
    assert answer("export", name, "--to", "exported.safetensors")["difference"] == 0.0
