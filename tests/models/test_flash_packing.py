"""Packed texts with model.args.attention=flash, whose kernels stand in as torch's own attention, text by text.

What is handed to the kernels is transformers' own doing; flash-attn itself needs a GPU, see tests/gpu.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from multigpu_cli.config.schema import AdapterConfig, Config, ModelConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import build_model, checkpoint_activations, find_adapter
from multigpu_cli.models.token_losses import TokenTargets, check_packing
from tests.support.tiny_language_models import SIZES, make_model_folder

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
dispatch = pytest.importorskip("transformers.modeling_flash_attention_utils")

PADDED = (5, 2, 4)  # tokens of the texts of a row, the last of which may be padding
CPU = torch.device("cpu")


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool = False, **_: Any) -> Tensor:
    """Stand in for flash_attn_func: (n, t, heads, width) each."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True).transpose(1, 2)


def attend_by_text(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int = 0, **more: Any
) -> Tensor:
    """Stand in for flash_attn_varlen_func: (tokens of all texts, heads, width) each."""
    bounds = cu_seqlens_q.tolist()
    assert (cu_seqlens_q.dtype, bounds[0], bounds[-1], cu_seqlens_k.tolist()) == (torch.int32, 0, len(q), bounds)
    assert max_seqlen_q >= max(end - first for first, end in pairwise(bounds))
    texts = [slice(first, end) for first, end in pairwise(bounds)]
    return torch.cat([attend(q[None, text], k[None, text], v[None, text], **more)[0] for text in texts])


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], nn.Module]:
    """Build a network of one architecture with sdpa or flash attention, both with the same weights."""

    def process(supports_mapping: Any = None, **request: Any) -> dict[str, Any]:
        return {"causal": request["is_causal"], "max_seqlen_q": request.get("max_seqlen_q") or 0}

    kernels = attend, attend_by_text, None, dispatch._pad_input, dispatch._unpad_input
    monkeypatch.setattr(dispatch, "lazy_import_flash_attention", lambda *_, **__: (kernels, (process, process)))

    def build(architecture: str, attention: str, adapter: str = "none") -> nn.Module:
        folder = make_model_folder(tmp_path / architecture, architecture)
        offered, adapt = (
            {"model_dir": str(folder), "seed": 0},
            find_adapter(Config(adapter=AdapterConfig(kind=adapter))),
        )
        model = build_model(ModelConfig(), "pretrained", offered, adapt=adapt).double()  # transformers casts float32
        if attention == "flash":  # not by the setting, which transformers refuses without the package
            model.network.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
        return model

    return build


def make_rows(rows: int) -> dict[str, Tensor]:
    places = torch.cat([torch.arange(length) for length in PADDED]).repeat(rows, 1)
    return {"input_ids": (torch.arange(places.numel()) * 7 % 200).view_as(places), "position_ids": places}


def backpropagate(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    targets = inputs["input_ids"].roll(-1, 1)
    losses = model(TokenTargets(inputs, targets)).losses
    return list(torch.autograd.grad(losses.sum(), list(model.parameters())))


@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.parametrize("rows", [1, 2])
def test_flash_gives_the_logits_and_gradients_of_sdpa(
    architecture: str, rows: int, build: Callable[[str, str], nn.Module]
) -> None:
    flash, sdpa = build(architecture, "flash"), build(architecture, "sdpa")
    inputs = make_rows(rows)
    torch.testing.assert_close(flash(inputs), sdpa(inputs))
    expected = backpropagate(sdpa, inputs)
    torch.testing.assert_close(backpropagate(flash, inputs), expected)
    checkpoint_activations(flash)
    torch.testing.assert_close(backpropagate(flash, inputs), expected)
    check_packing(flash, 200, CPU)


def test_flash_in_a_lora_adapter_keeps_texts_apart(build: Callable[..., nn.Module]) -> None:
    pytest.importorskip("peft")
    flash, sdpa = build("llama", "flash", "lora"), build("llama", "sdpa", "lora")
    torch.testing.assert_close(flash(make_rows(2)), sdpa(make_rows(2)))


def test_flash_reads_a_mask_of_the_batch(build: Callable[[str, str], nn.Module]) -> None:
    """With a mask the rows are texts, as transformers takes them."""
    flash, sdpa = build("llama", "flash"), build("llama", "sdpa")
    mask = torch.tensor([[1] * 11, [1] * 7 + [0] * 4])
    inputs = {"input_ids": make_rows(2)["input_ids"], "position_ids": torch.arange(11).repeat(2, 1)}
    masked = inputs | {"attention_mask": mask}
    torch.testing.assert_close(flash(masked)[mask.bool()], sdpa(masked)[mask.bool()])


class LeaksInSeveralRows(nn.Module):
    """Keeps the texts of a lone row apart, as flash attention of transformers does by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 50)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        values = self.embedding(inputs["input_ids"])
        if len(values) == 1:
            starts = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
            return torch.cat([part.cumsum(1) for part in values.tensor_split(starts, 1)], 1)
        logits: Tensor = values.cumsum(1)
        return logits


class LeaksBetweenRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 50)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        values: Tensor = self.embedding(inputs["input_ids"])
        return values + values.roll(1, 0) if len(values) > 1 else values


@pytest.mark.parametrize("network", [LeaksInSeveralRows, LeaksBetweenRows])
def test_check_packing_refuses_what_leaks_in_two_rows(network: type[nn.Module]) -> None:
    with pytest.raises(RequestError, match="--packing on: in this network packed samples see each other"):
        check_packing(network(), 50, CPU)


def test_check_packing_refuses_flash_without_bounds(
    build: Callable[[str, str], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama", "flash")
    monkeypatch.setattr(model, "_takes_bounds", False)
    with pytest.raises(RequestError, match="--packing on"):
        check_packing(model, 200, CPU)
