import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from multigpu_cli.checkpoint.initial_weights import load_initial_weights
from multigpu_cli.config.schema import AdapterConfig, Config, ModelConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.language.adapter import adapter_weights, as_reference, find_adapted, merge_adapter
from multigpu_cli.models.build import build_model, build_on_meta, find_adapter, find_unsaved_tensors
from multigpu_cli.optimizers.eval_weights import EMAModel, list_unsaved_parameters
from tests.support.tiny_language_models import SIZES, make_model_folder

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model_folder(tmp_path_factory.mktemp(name), name) for name in SIZES}


def build(
    folder: Path,
    kind: str = "lora",
    seed: int = 1,
    freeze: tuple[str, ...] = (),
    dtype: str = "float32",
    **adapter: Any,
) -> nn.Module:
    config, offered = ModelConfig(freeze=freeze, args={"dtype": dtype}), {"model_dir": str(folder), "seed": seed}
    return build_model(
        config, "pretrained", offered, adapt=find_adapter(Config(adapter=AdapterConfig(kind=kind, **adapter)))
    )


def learn(model: nn.Module) -> None:
    """Move what learns, so that the adapter counts."""
    with torch.no_grad():
        for number, weight in enumerate(p for p in model.parameters() if p.requires_grad):
            weight.add_(torch.linspace(-0.3, 0.3, weight.numel()).view_as(weight).roll(number))


def compute_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(TOKENS)
    return logits


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("architecture", SIZES)
def test_an_adapter_begins_as_the_network_and_learns_beside_it(
    kind: str, architecture: str, folders: dict[str, Path]
) -> None:
    base = build_model(ModelConfig(), "pretrained", {"model_dir": str(folders[architecture])})
    model = build(folders[architecture], kind)
    assert find_adapted(model) is not None
    assert find_adapted(base) is None
    torch.testing.assert_close(compute_logits(model), compute_logits(base))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(model.state_dict())
    learn(model)
    learned = compute_logits(model)
    assert not torch.allclose(learned, compute_logits(base), atol=0.1)
    flags = [p.requires_grad for p in model.parameters()]
    with as_reference(model):
        assert torch.equal(compute_logits(model), compute_logits(base))
    assert torch.equal(compute_logits(model), learned)
    assert flags == [p.requires_grad for p in model.parameters()]
    merged = merge_adapter(model)(TOKENS).logits
    torch.testing.assert_close(merged, learned, rtol=1e-4, atol=1e-5)


def test_every_layer_but_the_head_has_one(folders: dict[str, Path]) -> None:
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in build(folders["llama"]).state_dict()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("kind", [pytest.param("lora", marks=pytest.mark.slow), "dora"])
def test_the_first_weights_follow_from_the_seed_alone(kind: str, folders: dict[str, Path]) -> None:
    one = build(folders["llama"], kind, dropout=0.1)
    torch.rand(5)
    before = torch.get_rng_state()
    same, other = build(folders["llama"], kind, dropout=0.1), build(folders["llama"], kind, seed=2)
    assert torch.equal(before, torch.get_rng_state()), "what is built after it draws other numbers"
    assert all(torch.equal(one.state_dict()[name], weight) for name, weight in same.state_dict().items())
    assert any(not torch.equal(one.state_dict()[name], weight) for name, weight in other.state_dict().items())
    on_meta, reason = build_on_meta(lambda: build(folders["llama"], kind, dropout=0.1))
    assert on_meta is not None, reason
    assert [(n, p.shape, p.requires_grad) for n, p in on_meta.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in one.named_parameters()
    ]


@pytest.mark.parametrize(("dtype", "learns"), [("float64", torch.float64), ("bfloat16", torch.float32)])
def test_its_number_format_is_that_of_the_base_but_at_least_float32(
    dtype: str, learns: torch.dtype, folders: dict[str, Path]
) -> None:
    on_meta, reason = build_on_meta(lambda: build(folders["gpt2"], "dora", dtype=dtype))
    assert on_meta is not None, reason
    for model in (build(folders["gpt2"], "dora", dtype=dtype), on_meta):
        formats = {(p.requires_grad, p.dtype) for p in model.parameters()}
        assert formats == {(False, getattr(torch, dtype)), (True, learns)}


def test_modules_that_learn_as_a_whole_do_so_in_float32_beside_a_base_in_half_precision(
    folders: dict[str, Path],
) -> None:
    saved = ("lm_head", "embed_tokens", "norm")
    base = build(folders["llama"], dtype="bfloat16")
    on_meta, reason = build_on_meta(lambda: build(folders["llama"], dtype="bfloat16", modules_to_save=saved))
    assert on_meta is not None, reason
    model = build(folders["llama"], dtype="bfloat16", modules_to_save=saved)
    for each in (model, on_meta):
        learning = {name: p.dtype for name, p in each.named_parameters() if p.requires_grad}
        assert sum(".modules_to_save." in name for name in learning) == 3
        assert set(learning.values()) == {torch.float32}
    assert torch.equal(compute_logits(model), compute_logits(base)), "a fresh one computes what the base does"
    model.train()(TOKENS).float().square().mean().backward()
    step = {name: p for name, p in model.named_parameters() if ".modules_to_save." in name}
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in step.values())
    before = {name: p.clone() for name, p in step.items()}
    torch.optim.AdamW(step.values(), lr=1e-5, weight_decay=0.0).step()
    for name, p in step.items():
        moved = p.grad != 0
        assert (p != before[name])[moved].float().mean() > 0.9, f"{name}: bfloat16 would round such steps away"
    learn(model)
    with as_reference(model):
        assert torch.equal(compute_logits(model), compute_logits(base))


def test_patterns_of_freeze_are_those_of_the_names_that_learn(folders: dict[str, Path]) -> None:
    first = "network.base_model.model.model.layers.0."
    model = build(folders["llama"], freeze=(f"{first}*",))
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learning
    assert not any(name.startswith(first) for name in learning)


def test_the_state_is_what_learns(folders: dict[str, Path]) -> None:
    model = build(folders["llama"], modules_to_save=("lm_head",))
    average = EMAModel(model, 0.9)
    learn(model)
    average.update_parameters(model)
    logits, state = compute_logits(model), model.state_dict()
    assert all(".lora_" in name or ".modules_to_save." in name for name in state)
    assert sum(value.numel() for value in average.state_dict().values()) == 1 + sum(v.numel() for v in state.values())
    assert "network.base_model.model.model.embed_tokens.weight" in find_unsaved_tensors(model)
    other = build(folders["llama"], modules_to_save=("lm_head",), seed=7)
    other.load_state_dict(state)
    assert torch.equal(compute_logits(other), logits)
    EMAModel(other, 0.9).load_state_dict(average.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*lora_A"):
        other.load_state_dict({name: value for name, value in state.items() if "layers.0.self_attn.q_proj" not in name})


def test_an_average_holds_what_learns_and_shares_the_rest(folders: dict[str, Path]) -> None:
    model = build(folders["qwen2"], modules_to_save=("norm",))
    base, learning = list_unsaved_parameters(model), [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in base} == {id(p) for p in model.parameters() if not p.requires_grad}
    whole, shared = EMAModel(model, 0.9), EMAModel(model, 0.9, base)
    own = {id(p) for p in shared.module.parameters()} - {id(p) for p in model.parameters()}
    assert len(own) == len(learning)
    frozen = [p.clone() for p in base]
    for _ in range(3):
        learn(model)
        whole.update_parameters(model)
        shared.update_parameters(model)
    assert torch.equal(compute_logits(shared.module), compute_logits(whole.module))
    assert not torch.equal(compute_logits(shared.module), compute_logits(model))
    state = shared.state_dict()
    assert state.keys() == whole.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in whole.state_dict().items())
    assert all(map(torch.equal, base, frozen))
    resumed = EMAModel(model, 0.9, base)
    resumed.load_state_dict(state)
    assert torch.equal(compute_logits(resumed.module), compute_logits(whole.module))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # between peft and transformers
def test_the_names_of_the_weights_are_those_of_pefts_own_files(folders: dict[str, Path], tmp_path: Path) -> None:
    model = build(folders["llama"], modules_to_save=("lm_head",))
    learn(model)
    model.network.save_pretrained(tmp_path)  # type: ignore[operator,union-attr]
    base = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(loaded(TOKENS).logits, compute_logits(model))
    written = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    own = adapter_weights(model)
    assert own.keys() == written.keys()
    assert all(torch.equal(own[name], value) for name, value in written.items())
    other = build(folders["llama"], modules_to_save=("lm_head",), seed=7)
    assert not load_initial_weights(other, tmp_path, partial=False).differences
    assert torch.equal(compute_logits(other), compute_logits(model))


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no such layer": ("llama", {"targets": ("qkv",)}, r"adapter.targets 'qkv' matches no layer.*q_proj, k_proj"),
    "no such module": ("llama", {"modules_to_save": ("head",)}, r"adapter.modules_to_save 'head' matches no module"),
    "a tied head": ("qwen2", {"modules_to_save": ("lm_head",)}, r"modules_to_save: .*tie_word_embeddings"),
    "a tied embedding": ("gpt2", {"targets": ("wte",)}, r"adapter.targets: .*tie_word_embeddings"),
    "both": ("llama", {"targets": ("lm_head",), "modules_to_save": ("lm_head",)}, "is trained in full, and has an"),
    "frozen base": ("llama", {"freeze": ("*embed_tokens*",)}, "matches no parameter that --adapter lets learn"),
    "frozen head": ("llama", {"modules_to_save": ("lm_head",), "freeze": ("*lm_head*",)}, "leave out one of them"),
    "all frozen": ("llama", {"freeze": ("*",)}, "no parameter is left to train"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_can_not_be_is_refused(fault: str, folders: dict[str, Path]) -> None:
    architecture, settings, said = WRONG[fault]
    with pytest.raises(RequestError, match=f"(?s){said}"):
        build(folders[architecture], **settings)


def test_without_peft_the_extra_is_named(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RequestError, match=r"peft is not installed\n.*multigpu-cli\[hugging-face\]"):
        build(folders["llama"])
