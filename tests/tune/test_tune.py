"""The command: what it refuses, and real studies on one, two and three slots, killed, widened, with two objectives."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

import main_multi_gpu
from multigpu_cli.monitor.journal import read_events
from tests.tune.studies import GOAL, SEARCH, kill_at_random, read_trials, tune

MOMENTUM = "optimizer.args.momentum=range(0,0.9)"
PPO = ("--config", "ppo_cartpole", "--objective", "val_reward:max", "--save-dir", "a")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*SEARCH, *GOAL), "needs --save-dir"),
        ((*SEARCH, "--save-dir", "a"), "needs --objective"),
        ((*SEARCH, "--save-dir", "a", "--objective", "train_loss:min"), "did you mean val_loss:min?"),
        ((*SEARCH, "--save-dir", "a", "--objective", "loss:min"), "did you mean val_loss:min?"),
        ((*SEARCH, "--save-dir", "a", "--objective", "test_f1:max"), "did you mean val_f1:max?"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--rungs", "1", "--max-steps", "30"), "max_steps: may end a run within"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--budget", "9epochs", "--max-steps", "30"), "max_steps: may end a run"),
        ((*SEARCH, *PPO, "--set", "env_steps=null", "--episodes", "9", "--rungs", "1"), "episodes: may end a run"),
        ((*SEARCH, *PPO), "env_steps: may end a run"),
        ((*SEARCH, *PPO, "--epochs", "9", "--rungs", "1"), "env_steps: may end a run"),
        (("--search", "best=choice(a,b)", *GOAL, "--save-dir", "a"), "--search best: the study itself decides"),
        (("--search", "momentum=range(0,1)", *GOAL, "--save-dir", "a"), "optimizer.args.momentum"),
        (("--search", "dropout=range(0,1)", *GOAL, "--save-dir", "a"), "model.args.dropout"),
        (
            ("--search", "optimizer=choice(adamw,sgd)", "--search", MOMENTUM, *GOAL, "--save-dir", "a"),
            "--search 'optimizer.args.momentum=range(0,0.9) when optimizer=sgd'",
        ),
        ((*GOAL, "--save-dir", "a"), "tune needs --search"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--rungs", "3,1"), "--rungs must ascend"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--rungs", "30"), "--rungs must ascend"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--rungs", "1", "--objective", "val_loss:min"), "several --objective"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--order", "asinc"), "did you mean 'async'"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--sampler", "grid"), "lr has no number of points"),
        (
            ("--search", "seed2=int(1,2000)", *GOAL, "--save-dir", "a", "--sampler", "grid"),
            "seed2 has no number of points",
        ),
        ((*SEARCH, *GOAL, *GOAL, "--save-dir", "a"), "a number is named twice"),
        ((*SEARCH, *GOAL, "--objective", "val_accuracy:min", "--save-dir", "a"), "a number is named twice"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--budget", "3h"), "--budget must be so many slot-hours or epochs"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--budget", "1.2.3epochs"), "--budget must be so many slot-hours"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--trials", "0"), "--trials must be a whole number"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--nproc-per-node", "2"), "nproc_per_node: it starts the runs"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--batch-size", "auto"), "--batch-size auto"),
        (("--search", "batch_size=choice(16,auto)", *GOAL, "--save-dir", "a"), "--batch-size auto"),
        ((*SEARCH, *GOAL, "--save-dir", "a", "--multi-gpu", "none"), "--multi-gpu none"),
        (("--search", "lrr=log(1e-3,1)", *GOAL, "--save-dir", "a"), "--search lrr: there is no such setting"),
        (("--search", "label_smoothing=range(0,2)", *GOAL, "--save-dir", "a"), "--search label_smoothing must be"),
        (("--search", "warmup_epochs=int(1,30)", *GOAL, "--save-dir", "a"), "the warm-up does not end"),
        ((*SEARCH, *GOAL, "--save-dir", "full"), "holds something else"),
        (("--lr", "3", "report", "a"), "--lr stands before the command 'report'"),
        (("report", "a"), "a: holds no study"),
        (("clean", "a", "--yes"), "a: holds no study"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_written(
    words: Sequence[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    assert main_multi_gpu.run(["tune", *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "a").exists()


def run_study(folder: Path, *words: str, slots: int = 1) -> dict[str, Any]:
    done = subprocess.run([*tune(folder, *words, slots=slots), "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def train_alone(folder: Path, command: str, *words: str) -> dict[str, Any]:
    """The command that a report prints, as a run of its own."""
    argv = [word.strip("'") for word in command.split()[1:]]
    own = [sys.executable, str(ROOT / "main_multi_gpu.py"), *argv, *words, "--save-dir", str(folder), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(own, capture_output=True, text=True, check=True).stdout)
    return found


@pytest.mark.slow
def test_one_two_and_three_slots_and_kills_give_the_same_bits(tmp_path: Path) -> None:
    found = [run_study(tmp_path / str(slots), slots=slots) for slots in (1, 2, 3)]
    assert read_trials(tmp_path / "1") == read_trials(tmp_path / "2") == read_trials(tmp_path / "3")
    assert found[0]["best"] == found[1]["best"] == found[2]["best"]
    kill_at_random(tmp_path / "killed", Random(3), kills=3)
    assert read_trials(tmp_path / "killed") == read_trials(tmp_path / "1")
    shown = subprocess.run(
        [sys.executable, str(ROOT / "main_multi_gpu.py"), "tune", "report", str(tmp_path / "2"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    best = json.loads(shown.stdout)["best"][0]
    assert best["number"] == found[0]["best"]["number"]
    assert (tmp_path / "2" / "report.png").stat().st_size > 10_000
    alone = train_alone(tmp_path / "alone", best["command"])
    assert alone["fingerprint"] == read_trials(tmp_path / "3")[best["number"]]["fingerprint"]
    assert found[0]["best"]["test"]["accuracy"] == alone["final"]["test_accuracy"]


@pytest.mark.slow
def test_two_slots_and_four_trials_inherit_and_stay_on_their_curves(tmp_path: Path) -> None:
    """One goes on, and has both slots: its weights are those of a run on one worker."""
    found = run_study(tmp_path / "a", "--rungs", "1", "--epochs", "4", slots=2)
    starts = [event for event in read_events(tmp_path / "a" / "study.jsonl") if event["event"] == "start"]
    assert [event["slots"] for event in starts] == [1, 1, 1, 1, 2]
    best = found["trials"][found["best"]["number"]]
    command = f"x --lr {best['params']['lr']} --model mlp --set model.args.width=8 --batch-size 64 --exact --epochs 4"
    alone = train_alone(tmp_path / "b", command, "--global-batch-size", "128", "--multi-gpu", "none")
    assert alone["fingerprint"] == best["fingerprint"]


POINT = """
import torch
from torch import nn

class Point(nn.Module):
    def __init__(self, x):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("x", torch.tensor(float(x)))
    def forward(self, inputs):
        return self.layer(inputs.flatten(1)) * 0 + self.x

def build(x):
    return Point(x)

def near_zero(outputs, targets):
    return outputs[:, 0] ** 2

def near_two(outputs, targets):
    return (outputs[:, 0] - 2) ** 2
"""


@pytest.mark.slow
def test_two_objectives_find_a_known_front(tmp_path: Path) -> None:
    """x² and (x − 2)² over [-2, 4]: the front is 0 ≤ x ≤ 2."""
    (tmp_path / "point.py").write_text(POINT)
    words = ["--model", "point:build", "--metric", "point:near_zero", "--metric", "point:near_two", "--max-steps", "1"]
    words += ["--search", "model.args.x=range(-2,4)", "--objective", "val_near_zero:min", "--trials", "6"]
    words += ["--objective", "val_near_two:min", "--generation", "3", "--slots", "2", "--save-dir", "study", "--json"]
    own = [sys.executable, str(ROOT / "main_multi_gpu.py"), "tune", "--multi-gpu", "auto", *words]
    done = subprocess.run(own, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    points = {trial["number"]: trial["params"]["model.args.x"] for trial in found["trials"]}
    for trial in found["trials"]:
        x = points[trial["number"]]
        (values,) = trial["values"].values()
        assert values == pytest.approx([x**2, (x - 2) ** 2], rel=1e-4, abs=1e-6)
    inside = {number for number, x in points.items() if 0 <= x <= 2}
    assert inside
    assert inside <= set(found["front"])
    outside = set(found["front"]) - inside
    assert len([number for number in outside if points[number] < 0]) <= 1  # the nearest on each side may stay
    assert len([number for number in outside if points[number] > 2]) <= 1
