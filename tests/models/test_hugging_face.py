import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from multigpu_cli.config.schema import ModelConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import build_model
from tests.distributed.launcher import run_command, torchrun
from tests.support.run_training import run_training

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LM = {"input_shape": (16,), "num_classes": 11, "task": "language-model", "mode": "flatten", "seed": 1}
SMALL = {
    "gpt2": {"n_layer": 1, "n_embd": 16, "n_head": 2},
    "llama": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2},
}
VIT = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "patch_size": 4}


def build(architecture: str, offered: dict[str, Any] = LM, /, **settings: Any) -> nn.Module:
    return build_model(ModelConfig(args={"architecture": architecture} | settings), "transformers", offered)


@pytest.mark.parametrize("architecture", SMALL)
def test_a_language_model_of_the_datasets_size(architecture: str) -> None:
    model = build(architecture, **SMALL[architecture])
    tokens = torch.randint(11, (3, 16))
    assert model(tokens).shape == (3, 16, 11)
    assert model({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}).shape == (3, 16, 11)


def test_classes_of_images_and_of_sequences() -> None:
    offered = LM | {"input_shape": (3, 8, 8), "num_classes": 4, "task": "classification"}
    assert build("vit", offered, **VIT)(torch.rand(2, 3, 8, 8)).shape == (2, 4)
    words = {"vocab_size": 30, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    model = build("bert", offered | {"input_shape": (6,)}, **words)
    assert model(torch.randint(30, (2, 6))).shape == (2, 4)


def test_a_network_that_a_user_built_is_adapted_too() -> None:
    offered = LM | {"factory": 1}
    config = ModelConfig(args={})
    model = build_model(config, "tests.models.test_hugging_face:own", offered)
    assert model(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 9)


def own() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=9, n_positions=8, **SMALL["gpt2"])
    network: nn.Module = transformers.GPT2LMHeadModel(config)
    return network


@pytest.mark.parametrize(
    ("architecture", "settings", "named", "remedy"),
    [
        ("gtp2", {}, "architecture: 'gtp2'", "did you mean 'gpt2'?"),
        ("gpt2", {"n_leyer": 1}, "gpt2 has no such setting", "did you mean 'n_layer'?"),
        ("vit", {}, "vit is not made for this", ""),
    ],
)
def test_what_transformers_does_not_know_is_refused(
    architecture: str, settings: dict[str, int], named: str, remedy: str
) -> None:
    with pytest.raises(RequestError, match=named) as refused:
        build(architecture, **settings)
    assert remedy in refused.value.remedy


@pytest.mark.slow
def test_a_dataset_and_a_network_of_other_packages_train_under_torchrun_by_flags_alone(tmp_path: Path) -> None:
    """Counting upwards is learned from rows of tokens, read by `datasets`."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    rows = ({"input_ids": [(start + at) % 7 for at in range(12)]} for start in range(120))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["data.args.path_or_paths=rows.jsonl", "data.args.split=train", "model.architecture=gpt2"]
    settings += [f"model.{name}={value}" for name, value in SMALL["gpt2"].items()]
    command = torchrun(
        2, "--json", data="datasets:Dataset.from_json", model="transformers", task="language-model", set=settings,
        epochs=6, base_lr="3e-2", save_dir="run", num_workers=0, global_batch_size=16, batch_size=8,
    )  # fmt: skip
    done = run_command(command, tmp_path, HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["world_size"], summary["strategy"]) == (2, "ddp")
    assert summary["final"]["test_accuracy"] > 0.8


def test_an_image_network_learns_classes_with_the_same_bits_on_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    classes = np.arange(60) % 3
    images = np.random.default_rng(0).integers(0, 60, (60, 3, 8, 8), dtype=np.uint8)
    images[np.arange(60), classes] += 150  # the brightest channel is the class
    np.savez("images.npz", X=images, y=classes)
    sets = ["model.architecture=vit", *(f"model.{name}={value}" for name, value in VIT.items())]
    flags: dict[str, Any] = {"data": "npz", "data_dir": ".", "model": "transformers", "task": "classification"}
    run: dict[str, Any] = {"epochs": 8, "base_lr": "2e-2", "global_batch_size": 12, "batch_size": 6, "exact": True}
    ends = [run_training(workers, **flags, **run, sets=sets, save_dir=f"{workers}") for workers in (1, 2)]
    assert not ends[0].error + ends[1].error
    assert ends[0].summary["fingerprint"] == ends[1].summary["fingerprint"]
    assert ends[0].summary["final"]["test_accuracy"] == 1.0
