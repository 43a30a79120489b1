"""The losses of single tokens against those of all logits at once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multigpu_cli.language.hugging_face import Logits
from multigpu_cli.models import token_losses
from multigpu_cli.models.build import checkpoint_activations
from multigpu_cli.models.networks.gpt import GPT
from multigpu_cli.models.token_losses import TokenTargets, find_difference
from tests.support.op_counter import Operations

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY, AT_ONCE = 97, 5
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": SMALL | {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gemma2": SMALL | {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "cohere": SMALL | {"logit_scale": 3.0},
    "granite": SMALL | {"logits_scaling": 0.3},
    "phi": SMALL,  # its head has a bias
}


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_losses, "_LOGITS", AT_ONCE * VOCABULARY)


def build(architecture: str, **settings: Any) -> Logits:
    names = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CONFIG_MAPPING[architecture](**ARCHITECTURES.get(architecture, SMALL) | names | settings)
    config.use_cache = False
    torch.manual_seed(0)
    return Logits(transformers.AutoModelForCausalLM.from_config(config).double())


def draw_tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1).masked_fill(tokens % 3 == 0, -100)


def take_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_and_gradients_are_those_of_all_logits(architecture: str, smoothing: float) -> None:
    model = build(architecture)
    for weight in model.parameters():
        weight.data.mul_(3)  # so that a soft cap counts
    tokens, targets = draw_tokens()
    count = int((targets != -100).sum())
    assert AT_ONCE < count < targets.numel()
    logits = model(tokens).flatten(0, 1)
    expected = cross_entropy(logits, targets.flatten(), reduction="none", label_smoothing=smoothing).view_as(targets)
    plain = take_gradients(model, expected.sum())
    for learned in (None, count, count + 2):  # a bound is enough
        found = model(TokenTargets(tokens, targets, learned, smoothing))
        torch.testing.assert_close(found.losses, expected, rtol=1e-12, atol=1e-12)
        gradients = take_gradients(model, found.losses.sum())
        assert gradients.keys() == plain.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-10, atol=1e-12, msg=name)
        total = model(TokenTargets(tokens, targets, learned, smoothing, summed=True)).losses
        torch.testing.assert_close(total, expected.sum()[None], rtol=1e-12, atol=1e-12)
        gradients = take_gradients(model, -0.5 * total.sum())
        assert gradients.keys() == plain.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, -0.5 * plain[name], rtol=1e-10, atol=1e-12, msg=name)
    with torch.no_grad():
        right = model(TokenTargets(tokens, targets, count)).right
    assert torch.equal(right, logits.argmax(1).view_as(targets) == targets)


class LargestTensor(TorchDispatchMode):
    """The most numbers in a tensor whose last dimension is the vocabulary."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        tensors = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        found = [each.numel() for each in tensors if each.shape[-1:] == (VOCABULARY,)]
        self.most = max(self.most, *found, 0)
        return made


@pytest.mark.parametrize("summed", [False, True])
def test_logits_of_all_tokens_exist_neither_forward_nor_backward(summed: bool) -> None:
    model = build("qwen2")
    tokens, targets = draw_tokens()
    with LargestTensor() as chunked:
        model(TokenTargets(tokens, targets, summed=summed)).losses.sum().backward()
    assert chunked.most == SMALL["hidden_size"] * VOCABULARY, "the head's own weights"
    with LargestTensor() as whole:
        model(tokens).sum().backward()
    assert whole.most == tokens.numel() * VOCABULARY


def count_head_products(model: nn.Module, *, summed: bool) -> int:
    """Matrix products of a pass with gradients in which the vocabulary is a dimension."""
    tokens, targets = draw_tokens()
    with Operations() as seen:
        model(TokenTargets(tokens, targets, None, 0.0, summed)).losses.sum().backward()
    products = [inputs for name, inputs in seen.inputs if name.startswith(("mm", "addmm"))]
    return sum(any(VOCABULARY in each.shape for each in inputs) for inputs in products)


def test_where_the_sum_suffices_no_logits_are_computed_again() -> None:
    """A product for logits, one for the gradient of rows and one for that of weights; what does not learn has none."""
    chunks = -(-27 // AT_ONCE)
    model = build("llama")
    assert count_head_products(model, summed=True) == 3 * chunks
    assert count_head_products(model, summed=False) == 4 * chunks - 1
    weight = model.get_parameter("network.lm_head.weight")
    hook = weight.register_hook(lambda gradient: gradient)
    assert count_head_products(model, summed=True) == 4 * chunks - 1, "it would see the gradient of each chunk"
    hook.remove()
    weight.requires_grad_(False)
    assert count_head_products(model, summed=True) == 2 * chunks
    torch.use_deterministic_algorithms(True)
    try:
        assert count_head_products(model, summed=True) == 3 * chunks - 1
    finally:
        torch.use_deterministic_algorithms(False)


def test_chunks_fill_the_tiles_of_a_gpus_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_losses, "_LOGITS", 200 * 3)
    sizes: list[int] = []

    def head(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return rows[:, :3] * 2

    hidden, targets = torch.ones(3, 100, 4, requires_grad=True), torch.ones(3, 100, dtype=torch.int64)
    token_losses.compute_token_losses(head, 3, hidden, TokenTargets(None, targets, summed=True))
    assert sizes == [128, 128, 44]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # between peft and transformers
@pytest.mark.parametrize("kind", ["scale", "adapter", "norm of the backbone"])
def test_whatever_learns_in_a_head_has_its_gradient(kind: str) -> None:
    model, (tokens, targets) = build("llama"), draw_tokens()
    if kind == "adapter":
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = Logits(peft.get_peft_model(model.network, peft.LoraConfig(target_modules=["lm_head"], r=2)).double())
        for name, weight in model.named_parameters():
            weight.data += 0.1 if "lora_B" in name else 0.0
    else:
        head: Any = model.network.lm_head
        head.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64)) if kind == "scale" else None
        norm: Any = model.get_submodule("network.model.norm")
        usual = head.forward
        head.forward = lambda rows: usual(rows) * head.scale if head.scale is not None else usual(norm(rows))
    single, total = (
        take_gradients(model, model(TokenTargets(tokens, targets, None, 0.0, summed)).losses.sum())
        for summed in (False, True)
    )
    assert total.keys() == single.keys()
    for name, gradient in single.items():
        torch.testing.assert_close(total[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_gradient_in_half_precision_is_less_exact_where_the_sum_suffices(dtype: torch.dtype) -> None:
    """In fp16 they are scaled before they are rounded, or the small ones would vanish and the large ones overflow."""
    model, (tokens, targets) = build("llama"), draw_tokens()
    plain = take_gradients(model, model(TokenTargets(tokens, targets)).losses.sum())
    model.float()
    errors, found = [], []
    for summed in (False, True):
        with torch.autocast("cpu", dtype):
            losses = model(TokenTargets(tokens, targets, None, 0.0, summed)).losses
        assert losses.dtype == torch.float32
        found.append(take_gradients(model, losses.sum() * 1e-6))
        wrong = {name: each * 1e6 - plain[name] for name, each in found[-1].items()}
        errors.append([float(wrong["network.lm_head.weight"].norm()), float(get_total_norm(wrong.values()))])
    if dtype == torch.float16:
        assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())
    for before, after in zip(*errors, strict=True):
        assert after <= 1.05 * before


def test_without_a_target_the_loss_is_zero_and_so_is_every_gradient() -> None:
    """DDP waits for the gradient of each weight."""
    model = build("llama")
    tokens, _ = draw_tokens()
    for learned, summed in ((0, False), (None, True)):
        found = model(TokenTargets(tokens, torch.full_like(tokens, -100), learned, 0.0, summed)).losses
        assert torch.equal(found, torch.zeros((1,) if summed else tokens.shape, dtype=found.dtype))
        gradients = take_gradients(model, found.sum())
        assert gradients.keys() == dict(model.named_parameters()).keys()
        assert not any(gradient.any() for gradient in gradients.values())


def test_a_network_in_whose_end_something_else_happens_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    model = build("llama")
    assert find_difference(model, VOCABULARY, device) == ""
    usual = type(model.network).forward

    def forward(self: Any, input_ids: Any = None, **named: Any) -> Any:
        """The number of tokens counts, of which a chunk has fewer."""
        output = usual(self, input_ids, **named)
        output.logits = output.logits * output.logits.shape[1]
        return output

    monkeypatch.setattr(type(model.network), "forward", forward)
    assert find_difference(model, VOCABULARY, device).startswith("the losses differ by ")
    opt = build("opt", ffn_dim=16, word_embed_proj_dim=16)
    assert "input_ids" in find_difference(opt, VOCABULARY, device), "its forward calls a part of its backbone"


def test_with_checkpointed_activations_the_layers_of_the_backbone_run_again() -> None:
    plain, thrifty = build("llama"), build("llama")
    checkpoint_activations(thrifty)
    runs: list[int] = []
    layer: nn.Module = thrifty.get_submodule("network.model.layers.0.mlp")
    layer.register_forward_pre_hook(lambda *_: runs.append(1))
    tokens, targets = draw_tokens()
    expected, found = (
        take_gradients(model, model(TokenTargets(tokens, targets)).losses.sum()) for model in (plain, thrifty)
    )
    assert len(runs) == 2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)


def test_a_forward_of_the_backbones_own_comes_back() -> None:
    """As --grad-checkpointing, or a user, may have set on the backbone as a whole."""
    model, (tokens, targets) = build("llama"), draw_tokens()
    backbone, calls = model._backbone, []
    before = backbone.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return before(*args, **kwargs)

    backbone.forward = count
    model(TokenTargets(tokens, targets)).losses.sum().backward()
    assert backbone.forward is count
    model(TokenTargets(tokens, targets))
    assert len(calls) == 2


@pytest.mark.parametrize("padding", [0, 3])
def test_gpt_ignores_masked_targets_of_unknown_number(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the head's weight is padded, and what is not counted is in every chunk."""
    torch.manual_seed(0)
    model = GPT((9,), VOCABULARY, depth=1, heads=2, width=16, dropout=0.0).double()
    monkeypatch.setattr(model, "_pad_head", lambda hidden: pad(model.tokens.weight, (0, 0, 0, padding)))
    tokens, targets = draw_tokens()
    expected = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    plain = take_gradients(model, expected)
    total = model(TokenTargets(tokens, targets, None, summed=True)).losses
    torch.testing.assert_close(total, expected[None], rtol=1e-12, atol=1e-12)
    gradients = take_gradients(model, total.sum())
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-10, atol=1e-12, msg=name)
