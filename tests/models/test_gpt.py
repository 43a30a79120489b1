from typing import Any

import pytest
import torch
from torch import nn

from multigpu_cli.errors import RequestError
from multigpu_cli.models.networks.gpt import GPT


def test_the_smallest_gpt2_has_its_124_million_parameters() -> None:
    with torch.device("meta"):
        model = GPT((1024,), 50257, depth=12, heads=12, width=768, bias=True)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808  # as OpenAI's


def test_nanogpts_model_for_cpus_has_its_size() -> None:
    model = GPT((64,), 65)
    assert sum(p.numel() for p in model.parameters()) == 804_096


def test_no_place_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = GPT((12,), 7, depth=2, heads=2, width=16).eval()
    tokens = torch.randint(7, (3, 12))
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 7
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 12, 7)
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6)
    assert (before[:, 8:] - after[:, 8:]).abs().max() > 1e-3
    assert torch.allclose(model(tokens[:, :5]), before[:, :5], atol=1e-6), "shorter sequences are welcome"


def test_attention_is_what_the_formula_says() -> None:
    torch.manual_seed(0)
    attention: Any = GPT((6,), 7, depth=1, heads=2, width=8).eval().blocks[0].attention
    x = torch.randn(2, 6, 8)
    by_head = attention.query_key_value(x).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    query, key, value = by_head
    scores = (query @ key.transpose(2, 3) / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(3) @ value).permute(0, 2, 1, 3).reshape(2, 6, 8)
    assert torch.allclose(attention(x), attention.out(mixed), atol=1e-6)


def test_what_is_added_to_the_residual_stream_starts_smaller() -> None:
    torch.manual_seed(0)
    model = GPT((16,), 50, depth=8, heads=4, width=128, bias=True)
    for name, parameter in model.named_parameters():
        spread = 0.02 / 4 if name.endswith(("out.weight", "narrow.weight")) else 0.02
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 2:
            assert float(parameter.detach().std()) == pytest.approx(spread, rel=0.1), name


def test_the_output_layer_is_the_embedding() -> None:
    model = GPT((4,), 9, depth=1, heads=1, width=8)
    assert [tuple(p.shape) for p in model.parameters()].count((9, 8)) == 1
    assert float(model(torch.zeros(1, 4, dtype=torch.int64)).detach().std()) < 1, "near-uniform guesses at the start"


def test_dropout_is_for_training_only() -> None:
    torch.manual_seed(0)
    model, tokens = GPT((4,), 9, depth=1, heads=1, width=8, dropout=0.5), torch.zeros(2, 4, dtype=torch.int64)
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))
    assert any(isinstance(module, nn.Dropout) for module in model.modules())


@pytest.mark.parametrize(("shape", "width", "named"), [((8,), 10, "4 heads"), ((3, 8), 16, "are not sequences")])
def test_what_can_not_be_built_is_refused(shape: tuple[int, ...], width: int, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        GPT(shape, 5, width=width)
