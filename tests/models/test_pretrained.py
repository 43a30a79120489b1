import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from multigpu_cli.config.schema import ModelConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.language import model_folder
from multigpu_cli.models.build import build_model
from multigpu_cli.models.token_losses import check_causal, check_packing
from tests.config.test_regular_files import within_seconds
from tests.support.tiny_language_models import SIZES, make_model_folder

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


TOKENS = torch.arange(18).view(2, 9)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("llama"))


def build(folder: Path | str, **args: Any) -> nn.Module:
    return build_model(ModelConfig(args=args), "pretrained", {"model_dir": str(folder)})


@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_weights_of_the_folder_and_packed_texts_apart(architecture: str, attention: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, architecture)
    model = build(folder, attention=attention)
    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    state = model.network.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(state[name], value) for name, value in own.state_dict().items())
    assert {value.dtype for value in state.values()} == {torch.float32}
    tokens = torch.randint(200, (2, 9))
    torch.testing.assert_close(model(tokens), own(tokens).logits)
    check_packing(model, 200, torch.device("cpu"))
    check_causal(model, 200, torch.device("cpu"))
    check_causal(model.to(torch.bfloat16), 200, torch.device("cpu"), places=1)


def test_gemma_2_says_which_attention_it_has_and_has_it(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "gemma2", head_dim=8)
    with pytest.raises(RequestError, match="attention") as refused:
        build(folder)
    assert refused.value.remedy == "--set model.args.attention=eager"
    model = build(folder, attention="eager")
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    torch.testing.assert_close(model(TOKENS), own(TOKENS).logits)
    check_packing(model, 200, torch.device("cpu"))


def test_mamba_learns_texts_that_stand_alone(tmp_path: Path) -> None:
    """It knows no places and has no attention: what came before in a pack would be part of its state."""
    folder = make_model_folder(tmp_path, "mamba", hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(RequestError, match="attention") as refused:
        build(folder)
    assert refused.value.remedy == "--set model.args.attention=eager"
    model = build(folder, attention="eager")
    places = torch.arange(9).expand(2, -1)
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    torch.testing.assert_close(model({"input_ids": TOKENS, "position_ids": places}), own(TOKENS).logits)
    check_causal(model, 200, torch.device("cpu"))
    with pytest.raises(RequestError, match="see each other") as leaking:
        check_packing(model, 200, torch.device("cpu"))
    assert leaking.value.remedy.startswith("--packing off")


class Leaking(nn.Module):
    """Attends to all that came before, whatever text it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 50)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.embedding(inputs["input_ids"]).cumsum(1)
        return logits


def test_a_network_that_mixes_packed_texts_is_refused() -> None:
    with pytest.raises(RequestError, match="--packing on: in this network packed samples see each other"):
        check_packing(Leaking(), 50, torch.device("cpu"))


def change_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def leave_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def leave_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def leave_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def put_below(folder: Path) -> None:
    (folder / "main").mkdir()
    (folder / "config.json").rename(folder / "main" / "config.json")


BROKEN = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "unknown architecture": (lambda folder: change_config(folder, model_type="unheard"), "unheard"),
    "code of its own": (
        lambda folder: change_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "code that comes with a model is not run",
    ),
    "no object": (lambda folder: (folder / "config.json").write_text("[]"), "--model-dir"),
    "heads that don't divide": (lambda folder: change_config(folder, num_attention_heads=5), "--model-dir"),
    "an adapter": (leave_adapter, "an adapter's folder is for --init-from"),
    "a folder above": (put_below, "--model-dir .*/model/main"),
    "pickled weights": (leave_pickle, "pytorch_model.bin is a pickle"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
    "a missing shard": (leave_index, "model-00002-of-00002.safetensors is missing, 1 of 2 shards"),
    "a larger model": (
        lambda folder: change_config(folder, num_hidden_layers=3),
        "9 tensors would stay at their initial values",
    ),
    "another width": (lambda folder: change_config(folder, intermediate_size=32), "mlp"),
    "a torn file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"123"),
        "model.safetensors is incomplete",
    ),
    "half a file": (cut_weights, "model.safetensors is incomplete"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_not_whole_is_refused(fault: str, llama: Path, tmp_path: Path) -> None:
    damage, said = BROKEN[fault]
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    damage(folder)
    with pytest.raises(RequestError, match=said):
        build(folder)


def test_nothing_is_downloaded() -> None:
    with pytest.raises(RequestError, match=r"no such folder.*nothing is downloaded"):
        build("nobody/such-a-model")


@pytest.mark.parametrize(("name", "value"), [("dtype", "int8"), ("attention", "none"), ("quantize", "2bit")])
def test_unknown_arguments_are_named(name: str, value: str, llama: Path) -> None:
    with pytest.raises(RequestError, match=f"model.args.{name} must be .*, not '{value}'"):
        build(llama, **{name: value})


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_four_bits_need_bitsandbytes(llama: Path) -> None:
    with pytest.raises(RequestError, match=r"quantize 4bit: bitsandbytes is not installed\n.*pip install bitsandbytes"):
        build(llama, quantize="4bit")


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attention_needs_its_package(llama: Path) -> None:
    with pytest.raises(RequestError, match=r"(?s)FlashAttention2.*pip install flash-attn.*attention=sdpa"):
        build(llama, attention="flash")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers is 1000000000, at most 4096"),
        ({"text_config": {"n_layer": 10**9}}, "config.json: n_layer is 1000000000"),
        ({"hidden_size": 2**20}, "config.json describes [0-9,]+ parameters, the weights have [0-9,]+ bytes"),
        ({"vocab_size": 10**9}, "config.json describes"),
        ({"vocab_size": 10**12}, "config.json"),
    ],
)
def test_config_of_absurd_sizes_is_refused_before_it_is_built(
    llama: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(llama, tmp_path / "absurd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(RequestError, match=message):
        build(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "x.bin", 1, []])
def test_index_names_safetensors_files_beside_it_only(llama: Path, tmp_path: Path, name: Any) -> None:
    folder = shutil.copytree(llama, tmp_path / "indexed")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(RequestError, match=r"names .* which is no \.safetensors file in the same folder"):
        build(folder)


def test_index_of_weights_that_is_no_mapping_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "listed")
    for content in ('{"weight_map": ["a"]}', "{}", '{"weight_map": null}'):
        (folder / "model.safetensors.index.json").write_text(content)
        with pytest.raises(RequestError, match=r"model\.safetensors\.index\.json names"):
            build(folder)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "chat_template.jinja", "x.safetensors"])
def test_fifo_in_a_model_is_refused(llama: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with within_seconds(20), pytest.raises(RequestError, match=f"--model-dir: .*{name} is a FIFO"):
        build(tmp_path)


def test_read_json_does_not_wait_for_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with within_seconds(20), pytest.raises(RequestError, match=r"a\.json: "):
        model_folder._read_json(tmp_path / "a.json")
