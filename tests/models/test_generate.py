from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.config.schema import AdapterConfig, Config, ModelConfig
from multigpu_cli.language.prompts import answer_prompt, draw_tokens
from multigpu_cli.models.build import build_model, find_adapter
from tests.support.tiny_language_models import SIZES, make_model_folder
from tests.support.trained_folders import learn

pytest.importorskip("transformers", reason="transformers is not installed")

PROMPT = [5, 9, 7, 30]


@pytest.mark.parametrize(("architecture", "adapter"), [*((name, "none") for name in SIZES), ("llama", "lora")])
def test_what_is_cached_is_what_is_computed_anew(architecture: str, adapter: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    offered = {"model_dir": str(make_model_folder(tmp_path, architecture)), "seed": 1}
    adapt = find_adapter(Config(adapter=AdapterConfig(kind=adapter)))
    model: Any = build_model(ModelConfig(), "pretrained", offered, adapt=adapt).eval()
    learn(model)
    lengths: list[int] = []

    def forward(inputs: dict[str, Any]) -> Tensor:
        lengths.append(inputs["input_ids"].shape[1])
        logits: Tensor = type(model).forward(model, inputs)
        return logits

    model.forward = forward
    for temperature in (0.0, 1.0):
        texts = []
        for cached in (True, False):
            model.make_cache = type(model).make_cache.__get__(model) if cached else dict
            draw = partial(draw_tokens, temperature=temperature, generator=torch.Generator().manual_seed(3))
            texts.append(answer_prompt(model, PROMPT, 6, 64, {10**6}, draw))
            assert lengths == ([4, 1, 1, 1, 1, 1] if cached else [4, 5, 6, 7, 8, 9])
            lengths.clear()
        assert texts[0] == texts[1]


class Successor(nn.Module):
    """Expects the next number of a hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        ids, places = inputs["input_ids"], inputs["position_ids"]
        assert places.tolist() == [list(range(ids.shape[1]))]
        return nn.functional.one_hot((ids + 1) % 100, 100) * self.scale


def test_an_answer_ends_at_an_end_or_where_there_is_no_more_room() -> None:
    assert answer_prompt(Successor(), [3, 4], 9, 50, {8, 20}) == [5, 6, 7, 8]
    assert answer_prompt(Successor(), [3, 8], 3, 50, {8, 20}) == [9, 10, 11], "an end in the prompt is none"
    assert answer_prompt(Successor(), [3, 4], 9, 5, {20}) == [5, 6, 7], "five places"
    assert answer_prompt(Successor(), [3, 4], 9, 50, {20}, agree=lambda token: min(2 * token, 20)) == [10, 20]
