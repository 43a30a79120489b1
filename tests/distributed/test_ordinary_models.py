"""Networks as people write them under --multi-gpu fsdp: but for torch, nothing is imported before they are built.

Ranks that a test forks inherit what it has imported, and that hid how torch's first calls on the meta device behave.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.monitor import journal
from tests.distributed.launcher import run_command
from tests.support.run_training import run_training
from tests.support.tiny_language_models import make_model_folder

SCRIPT = str(Path(__file__).with_name("two_ranks.py"))
RUN: dict[str, Any] = {
    "global_batch_size": 12, "batch_size": 3, "log_interval": 1, "lr": 0.01, "schedule": "constant", "hang_timeout": 45,
}  # fmt: skip
IMAGES = {"data": "tests.support.user_code:tensors", "sets": ["data.args.shape=[2,8,8]"]}
TEXT = {"data": "tests.support.user_code:sentences", "task": "language-model"}
CASES: dict[str, dict[str, Any]] = {
    "gpt": TEXT | {"model": "gpt", "ema": 0.9},
    "unsaved": TEXT | {"model": "gpt", "sets": ["model.args.saved=false"]},
    "unet": IMAGES | {"model": "unet", "ema": 0.9},
    "vit": IMAGES | {"model": "vit"},
    "lstm": IMAGES | {"model": "lstm"},
    "exact": IMAGES | {"model": "unet", "exact": True},
    "folder": TEXT | {"model": "pretrained", "model_dir": "gpt2"},
}
STOP = 4  # steps, and then it goes on
SENT = "rank 0 builds the weights in host memory, and each rank gets its rows"
UNSENT = "no rank builds the weights: the checkpoint has them"
REBUILT = ("unsaved", "exact")  # for a buffer that is in no checkpoint, and for the layout of kernels


def request(name: str, folder: str, steps: int) -> dict[str, Any]:
    case = CASES[name]
    model = case["model"] if name == "folder" else f"tests.support.ordinary_models:{case['model']}"
    return RUN | case | {"model": model, "save_dir": folder, "max_steps": steps}


def read_losses(folder: str) -> dict[tuple[int, str], float]:
    """By step and kind of event; a run that ends is evaluated there, which one that goes on is not."""
    lines = [line for line in journal.read_events(f"{folder}/journal.jsonl") if line["event"] in ("train", "eval")]
    losses = {(line["step"], line["event"]): line["loss"] for line in lines if line.get("split") != "test"}
    losses.pop((STOP, "eval"), None)
    return losses


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize(
    "names", [["gpt"], pytest.param(["unet", "unsaved", "vit", "lstm", "exact", "folder"], marks=pytest.mark.slow)]
)
def test_two_workers_and_a_resume_have_the_curve_of_one(names: list[str]) -> None:
    """A resume begins in new processes, and if the checkpoint has everything, nobody builds the weights."""
    if "folder" in names:
        make_model_folder(Path("gpt2"), "gpt2")
    for name in names:
        requests = [json.dumps(request(name, name, steps) | {"multi_gpu": "fsdp"}) for steps in (STOP, 7)]
        ended = run_command([sys.executable, SCRIPT, *requests], Path())
        assert ended.returncode == 0, ended.stderr
        one = run_training(1, **request(name, "one", 7) | {"multi_gpu": "none", "save_dir": f"{name}1"})
        assert one.error == ""
        plans = [line["plan"] for line in journal.read_events(f"{name}/journal.jsonl") if line["event"] == "start"]
        sources = [plan["first_weights"] for plan in plans]
        assert sources == [SENT, SENT if name in REBUILT else UNSENT]
        assert read_losses(name) == pytest.approx(read_losses(f"{name}1"), rel=1e-4)


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_an_embedding_with_sparse_gradients_is_refused_before_anything_is_written(strategy: str) -> None:
    case = RUN | TEXT | {"model": "tests.support.ordinary_models:sparse", "optimizer": "sgd", "save_dir": "run"}
    ended = run_training(1 + (strategy == "fsdp"), **case, multi_gpu=strategy)
    assert (ended.kind, "the embedding '0' has sparse=True" in ended.error) == ("RequestError", True), ended.error
    assert not Path("run").exists()
