"""Run folders that a stranger, a kill or a bad disk has left: data alone, which starts nothing and hangs nobody."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.checkpoint.manifest import MANIFEST, find_damage, read_manifest, sign_manifest
from tests.support.forked_command import ForkedCommand, Outcome, call
from tests.support.wait_until import wait_until

pytestmark = pytest.mark.slow
TRAIN: tuple[str, ...] = (
    "--model",
    "mlp",
    "--max-steps",
    "60",
    "--checkpoint-every",
    "3",
    "--exact",
    "--log-interval",
    "2",
    "--quiet",
)
TRAIN += ("--global-batch-size", "256", "--batch-size", "64", "--num-workers", "0", "--multi-gpu", "none")
CHECKPOINT = "checkpoints/step_00000012"
PLANTED = "sh -c 'touch owned'"


def read_fingerprint(run: Path) -> str:
    fingerprint: str = json.loads((run / "summary.json").read_text())["fingerprint"]
    return fingerprint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the undisturbed run, and one that was killed after step 12."""
    home = tmp_path_factory.mktemp("runs")
    assert call([*TRAIN, "--save-dir", str(home / "sound")], home, home).code == 0
    command = ForkedCommand([*TRAIN, "--save-dir", str(home / "killed")], home, home)
    wait_until((home / "killed" / CHECKPOINT / MANIFEST).exists, "a checkpoint")
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    return home


@pytest.fixture
def run(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(original / "killed", tmp_path / "run")
    return tmp_path / "run"


def execute(run: Path, *words: str) -> Outcome:
    """A command that may write in the folder of its run, and in `branch` and `report` next to it."""
    return call([*words], run.parent, run.parent)


FIFOS: tuple[str, ...] = (
    "summary.json",
    ".lock",
    "logs/state.json",
    "plan.json",
    "journal.jsonl",
    "config.yaml",
    "best.pt",
)
FIFOS += ("mirror.json", f"{CHECKPOINT}/manifest.json", f"{CHECKPOINT}/state.pt")


@pytest.mark.parametrize("command", ["status", "report", "checkpoints", "evaluate", "--save-dir"])
@pytest.mark.parametrize("name", FIFOS)
def test_fifo_in_a_run_hangs_no_command(name: str, command: str, run: Path) -> None:
    fifo = run / name
    fifo.parent.mkdir(parents=True, exist_ok=True)
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    outcome = execute(run, command, str(run), *(["--quiet"] if command == "--save-dir" else []))
    assert outcome.is_clear(), outcome


EDITS: dict[str, Any] = {
    "missing": None,
    "empty": "",
    "NULs": "\0" * 4096,
    "two documents": ("\n", "\n---\nseed: 1\n"),
    "duplicate key": ("\n", "\nseed: 1\n"),
    "seed": ("seed: 42", "seed: 43"),
    "base_lr": ("base_lr: null", "base_lr: 0.01"),
    "weight_decay": ("weight_decay: 0.0001", "weight_decay: 0.0009"),
    "width": ("  name: mlp\n  args: {}", "  name: mlp\n  args:\n    width: 8"),
    "exact": ("exact: true", "exact: false"),
    "notify": ("notify: null", f'notify: "{PLANTED}"'),
    "mirror": ("mirror: null", "mirror: 'file:owned'"),
    "logger": ("logger:\n  name: []", "logger:\n  name: ['mlflow']"),
    "hook": ("hook:\n  name: []", "hook:\n  name: ['evil:Hook']"),
}


@pytest.mark.parametrize("edit", [*EDITS, 10, 35, 60])
def test_resume_does_not_depend_on_config_yaml(edit: str | int, original: Path, run: Path) -> None:
    """Be it edited, missing, or cut after some lines: the checkpoint has the settings."""
    file, text = run / "config.yaml", (run / "config.yaml").read_text()
    change = "".join(text.splitlines(keepends=True)[:edit]) if isinstance(edit, int) else EDITS[edit]
    if isinstance(change, tuple):
        before, after = change
        assert before in text
        change = text + after if before == "\n" else text.replace(before, after)
    file.unlink() if change is None else file.write_text(change)
    outcome = execute(run, "--save-dir", str(run), "--quiet")
    assert outcome.is_clear(), outcome
    assert outcome.code == 0, outcome
    assert read_fingerprint(run) == read_fingerprint(original / "sound")
    assert not Path("owned").exists()


def plant(run: Path) -> None:
    """Name programs and a mirror in everything that has settings, and sign it."""
    planted = {
        "notify": PLANTED,
        "mirror": f"file:{run.parent}/owned",
        "logger": ["evil:Logger"],
        "hook": ["evil:Hook"],
    }
    manifest = {key: value for key, value in read_manifest(run / CHECKPOINT).items() if key != "sha256"}
    manifest["settings"] |= planted
    manifest["written"] = [*manifest["written"], *planted]
    (run / CHECKPOINT / MANIFEST).write_bytes(sign_manifest(manifest))
    assert find_damage(run / CHECKPOINT) is None
    weights = torch.load(run / "best.pt", weights_only=True)
    weights["config"] |= planted
    torch.save(weights, run / "best.pt")
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("notify: null", f'notify: "{PLANTED}"'))


@pytest.mark.parametrize(
    "words",
    [
        *(["--save-dir", "run", "--quiet"], ["--resume", "run", "--save-dir", "branch", "--quiet"]),
        *(["--init-from", "run/best.pt", "--model", "mlp", "--save-dir", "branch", "--max-steps", "1", "--quiet"],),
        *(["evaluate", "run"], ["predict", "run", "--out", "predictions.csv"], ["export", "run", "--to", "model.pt"]),
        *(
            ["status", "run"],
            ["report", "run"],
            ["checkpoints", "run"],
            ["verify", "run", "run"],
            ["plan", "--config", "x"],
        ),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_strangers_run_starts_no_program(words: list[str], run: Path) -> None:
    plant(run)
    Path("evil.py").write_text("open('owned', 'w').close()\n")
    outcome = execute(run, *words)
    assert outcome.is_clear(), outcome
    assert not Path("owned").exists()


def test_run_killed_at_random_ends_with_the_same_bits(original: Path, tmp_path: Path) -> None:
    rng, run = random.Random(3), tmp_path / "run"
    for _ in range(6):
        command = ForkedCommand([*TRAIN, "--save-dir", str(run)], tmp_path, tmp_path)
        time.sleep(rng.uniform(0.1, 1.5))
        os.kill(command.pid, signal.SIGKILL)
        assert command.wait().code in (-signal.SIGKILL, 0)
    outcome = call([*TRAIN, "--save-dir", str(run)], tmp_path, tmp_path)
    assert outcome.code == 0, outcome
    assert read_fingerprint(run) == read_fingerprint(original / "sound")
    assert [*run.rglob("*draft*")] == []
