"""The bytes that are counted without memory are those that a real pass keeps."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from multigpu_cli.commands.plan.from_config import count_kept_bytes
from multigpu_cli.config.schema import AdapterConfig, Config, ModelConfig
from multigpu_cli.models.build import build_model, build_on_meta, find_adapter
from multigpu_cli.models.token_losses import TokenTargets
from tests.support.tiny_language_models import make_model_folder

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

TOKENS = 32


def build(folder: Path) -> nn.Module:
    adapt = find_adapter(Config(adapter=AdapterConfig(kind="lora", r=4)))
    model = build_model(ModelConfig(), "pretrained", {"model_dir": str(folder), "seed": 1}, adapt=adapt)
    return model.train()


def count_really(model: nn.Module, rows: int, dtype: torch.dtype | None) -> int:
    ids = torch.zeros(rows, TOKENS, dtype=torch.long)
    places = torch.arange(TOKENS) % 20  # of packed samples
    inputs = {"input_ids": ids, "position_ids": places.expand(rows, -1).contiguous()}
    known = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers(), *inputs.values()]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in known:
            kept[place] = tensor
        return tensor

    with (
        saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=dtype, enabled=dtype is not None),
    ):
        model(TokenTargets(inputs, ids))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_what_is_counted_is_what_a_pass_keeps(architecture: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", architecture)
    real = build(folder)
    for dtype in (None, torch.bfloat16):
        model, reason = build_on_meta(lambda: build(folder))
        assert model is not None, reason
        counted = count_kept_bytes(model, (1, 3), TOKENS, dtype)
        assert counted == pytest.approx([count_really(real, rows, dtype) for rows in (1, 3)], rel=0.02)
