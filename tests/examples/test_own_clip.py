"""examples/own_clip.py, killed and resumed on two workers: the same bits, and images find their captions."""

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.die_at_third_checkpoint import die_at_third_checkpoint
from tests.support.run_training import run_training

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_clip.py"
FLAGS: dict[str, Any] = {
    "data": "own_clip:pairs",
    "model": "own_clip:TwoTowers",
    "task": "from-model",
    "batch_size": 100,
    "global_batch_size": 200,
    "epochs": 10,
    "num_workers": 0,
    "exact": True,
}


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("own_clip", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_zero_shot(folder: str) -> float:
    """The share of test images whose nearest caption of all 40 is their own."""
    example = load_example()
    model, test = example.TwoTowers(), example.pairs("test", 0)
    model.load_state_dict(torch.load(f"{folder}/last.pt", weights_only=True)["model"])
    captions = [example.write_caption(*each) for each in itertools.product(range(10), (True, False), (True, False))]
    samples = [test[index] for index in range(len(test))]
    with torch.no_grad():
        images = torch.stack([sample["image"] for sample in samples])
        texts = torch.stack(captions)
        padded = torch.cat([images, images[:1].expand(max(0, len(texts) - len(images)), -1, -1, -1)])
        of_images = model(padded, texts[:1].expand(len(padded), -1))["image"][: len(images)]
        of_texts = model(images[:1].expand(len(texts), -1, -1, -1), texts)["text"]
    chosen = texts[(of_images @ of_texts.T).argmax(1)]
    own = torch.stack([sample["text"] for sample in samples])
    return float((chosen == own).all(1).float().mean())


@pytest.mark.slow
def test_images_find_their_captions_on_any_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    alone = run_training(**FLAGS, save_dir="alone")
    assert alone.error == ""
    assert run_training(2, **FLAGS, save_dir="two", prepare=die_at_third_checkpoint).killed
    resumed = run_training(3, **FLAGS, save_dir="two")
    assert resumed.error == ""
    assert resumed.summary["resumed_from"]
    assert alone.summary["fingerprint"] == resumed.summary["fingerprint"]
    assert alone.summary["final"] == resumed.summary["final"]
    assert measure_zero_shot("alone") > 0.5, "by chance 1 of 40"
