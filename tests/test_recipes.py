"""Every shipped recipe trains for three steps on a few samples in its dataset's own format."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support import tiny_datasets
from tests.support.run_training import run_training
from tests.support.tiny_language_models import make_model_folder

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(ROOT.glob("configs/*.yaml"))
FILES = {
    "har": tiny_datasets.har,
    "mnist": tiny_datasets.mnist,
    "fashion-mnist": tiny_datasets.mnist,
    "cifar10": tiny_datasets.cifar10,
    "text": tiny_datasets.text,
    "chat": tiny_datasets.chat,
}
SMALLER = {
    "cifar10": ["model.args.width=8"],
    "synthetic": ["data.args.train=100", "data.args.val=20", "data.args.test=20"],
    "gpt2_124m": [
        *("data.args.block=16", "data.args.windows=24", "data.args.vocabulary=100", "global_batch_size=8"),
        *("model.args.depth=1", "model.args.width=12", "warmup_epochs=0", "compile=off"),
    ],
    "clstm_ppo": ["data.args.made_days=600", "task.args.rollout=16"],
    "ppo_cartpole": ["task.args.evaluate_episodes=2", "task.args.rollout=16"],
    "ppo_cartpole_masked": ["task.args.evaluate_episodes=2", "task.args.rollout=16"],
}
STEPS = 3


def name_of(recipe: Path) -> str:
    """The dataset of a recipe."""
    data = (yaml.safe_load(recipe.read_text()) or {}).get("data", "digits")
    return str(data["name"] if isinstance(data, dict) else data)


def shorten_recipe(recipe: Path, folder: Path) -> dict[str, Any]:
    """The settings that make a recipe brief; only the length and the data are not its own."""
    name = name_of(recipe)
    data = {"data_dir": str(FILES[name](folder / "data"))} if name in FILES else {}
    if name == "chat":
        pytest.importorskip("peft", reason="peft is not installed")
        data["model_dir"] = str(make_model_folder(folder / "model", places=128))
    return data | {"max_steps": STEPS, "save_dir": str(folder / "run")}


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_trains(recipe: Path, tmp_path: Path) -> None:
    sets = [*([] if "ppo" in recipe.stem else ["drop_last=false"]), *SMALLER.get(recipe.stem, [])]
    own: dict[str, Any] = {"data": None, "model": None}  # the recipe's, not those of the other tests
    ended = run_training(recipe=str(recipe), sets=sets, **own, **shorten_recipe(recipe, tmp_path))
    assert ended.error == ""
    summary = ended.summary
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    measures = {"val_loss" if name_of(recipe) in ("text", "chat") else "test_loss", "test_reward"} & summary[
        "final"
    ].keys()
    assert any(isinstance(summary["final"][measure], float) for measure in measures)
    assert len(summary["fingerprint"]) == 64
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_says_what_it_is(recipe: Path) -> None:
    assert recipe.read_text().startswith("# "), "its first comment is what `recipes` lists"


@pytest.mark.slow
def test_gpt2_124m_steps_at_its_full_size(tmp_path: Path) -> None:
    """Three steps of one short window: 124 million parameters, and a loss that begins near that of guessing."""
    recipe = ROOT / "configs" / "gpt2_124m.yaml"
    small = ["data.args.block=16", "data.args.windows=4", "batch_size=1", "global_batch_size=1", "keep=1"]
    words = ["--config", str(recipe), "--multi-gpu", "none", "--json"]
    for name, value in shorten_recipe(recipe, tmp_path).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    for setting in ("drop_last=false", "warmup_epochs=0", "compile=off", *small):
        words += ["--set", setting]
    try:
        command = [sys.executable, str(ROOT / "main_multi_gpu.py"), *words]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr
        summary = json.loads(result.stdout)
        assert (summary["status"], summary["steps"]) == ("completed", STEPS)
        assert summary["final"]["train_loss"] == pytest.approx(math.log(50304), abs=2)
        state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["model"]
    finally:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)  # two gigabytes
    counted = {name: value.numel() for name, value in state.items()}
    assert counted.pop("places.weight") == 16 * 768, "1,024 of them in the recipe's own windows"
    assert sum(counted.values()) + 1024 * 768 == 124_373_760
