"""What checkpoints record of a pretrained model: another one is refused, by name; the same one may lie elsewhere."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.weights import load_trained_weights
from multigpu_cli.commands.inference import load_run, load_run_without_data
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.errors import RequestError
from tests.support.run_training import run_training
from tests.support.tiny_language_models import make_model_folder

pytest.importorskip("peft", reason="peft is not installed")

FLAGS: dict[str, Any] = {
    "model": "pretrained",
    "model_dir": "model",
    "data": "chat",
    "data_dir": "talks.jsonl",
    "max_length": 80,
    "batch_size": 2,
    "num_workers": 0,
    "max_steps": 1,
    "sets": ["data.val=0"],
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and runs on it: with an adapter, and without."""
    place = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        make_model_folder(place / "model", places=128)
        talk = {"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "Paris"}]}
        Path("talks.jsonl").write_text((json.dumps(talk) + "\n") * 4)
        for adapter in ("lora", "none"):
            ended = run_training(1, **FLAGS, adapter=adapter, save_dir=adapter)
            assert not ended.error, ended.error
    return place


@pytest.fixture
def here(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("<|im_end|>\n", "<|im_end|>"))


def change_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    parts = json.loads(file.read_text())
    parts["model"]["merges"].pop()
    file.write_text(json.dumps(parts))


def change_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")


CHANGES: dict[str, Callable[[Path], None]] = {
    "another chat template": change_template,
    "another tokenizer": change_tokenizer,
    "other weights": change_weights,
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_one_is_refused_by_name(what: str, here: Path) -> None:
    CHANGES[what](here / "model")
    for adapter in ["lora"] if what == "other weights" else ["lora", "none"]:  # else the checkpoint has the weights
        before = {path: path.read_bytes() for path in Path(adapter).rglob("*") if path.is_file()}
        ended = run_training(1, **FLAGS | {"max_steps": 2}, adapter=adapter, save_dir=adapter)
        assert ended.kind == "RequestError"
        assert f"--model-dir model has {what} than {adapter} was started with" in ended.error
        assert before == {path: path.read_bytes() for path in Path(adapter).rglob("*") if path.is_file()}
    with pytest.raises(RequestError, match=f"has {what} than"):
        load_run(load_trained_weights(Path("lora")), InferenceRequest(run=Path("lora")))


def lose_weights_after_first_checkpoint() -> None:
    """In the process of the run."""

    def save_and_lose(store: Store, step: int, *rest: Any, save: Any = Store.save) -> int:
        size = int(save(store, step, *rest))
        Path("model/model.safetensors").unlink(missing_ok=True)
        return size

    Store.save = save_and_lose  # type: ignore


def test_what_was_read_is_recorded_whatever_becomes_of_the_file(here: Path) -> None:
    changes = {"max_steps": 2, "checkpoint_every": 1, "adapter": "lora", "save_dir": "again"}
    ended = run_training(1, **FLAGS | changes, prepare=lose_weights_after_first_checkpoint)
    assert not ended.error, ended.error
    recorded = load_trained_weights(Path("lora")).settings["base"]
    assert load_trained_weights(Path("again")).settings["base"] == recorded
    newest = Store(Path("again/checkpoints"), 1).find_newest()[0]
    assert newest is not None
    assert newest.manifest["step"] == 2
    assert newest.manifest["settings"]["base"] == recorded


def test_the_same_one_may_lie_elsewhere(here: Path) -> None:
    (here / "model").rename("moved")
    changes = {"model_dir": "moved"}
    weights = load_trained_weights(Path("lora"))
    request = InferenceRequest(run=Path("lora"), changes=changes)
    run = load_run(weights, request)
    torch.testing.assert_close(dict(run.model.state_dict()), weights.state)
    load_run_without_data(weights, request)
    ended = run_training(1, **FLAGS | changes | {"max_steps": 2}, adapter="lora", save_dir="lora")
    assert not ended.error, ended.error
    assert ended.summary["steps"] == 2


def test_a_checkpoint_holds_no_weights_of_the_base(done: Path) -> None:
    newest = Store(done / "lora/checkpoints", 1).find_newest()[0]
    assert newest is not None
    assert all(".lora_" in name for name in newest.state()["model"])
    assert set(newest.manifest["settings"]["base"]) == {"weights", "tokenizer", "template"}
    sizes = [sum(file.stat().st_size for file in (done / name).rglob("*.pt")) for name in ("lora", "none")]
    assert sizes[0] < sizes[1]
