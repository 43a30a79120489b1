"""Run folders of fine-tuned models with the weights that a training would leave, without the training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multigpu_cli.checkpoint.weights import save_weights
from multigpu_cli.config.resume_rules import flatten_settings, replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.models.build import build_model, find_adapter

_PLACES = 48


def learn(model: nn.Module) -> None:
    """Move what learns, so that it counts."""
    with torch.no_grad():
        for number, weight in enumerate(p for p in model.parameters() if p.requires_grad):
            weight.add_(torch.linspace(-0.3, 0.3, weight.numel()).view_as(weight).roll(number).to(weight.dtype))


def save_trained_run(folder: Path, model_dir: Path, *, template: str = "", **settings: Any) -> nn.Module:
    """Write best.pt of a run; returns its network.

    Args:
        template: the run's own chat template.
    """
    config = replace_settings(Config(), {"model": "pretrained", "model_dir": str(model_dir), "data": "chat"} | settings)
    args = {name: value for name, value in config.model.args.items() if name != "quantize"}  # which needs a GPU
    offered = {"model_dir": str(model_dir), "seed": 1}
    model = build_model(replace(config.model, args=args), "pretrained", offered, adapt=find_adapter(config))
    learn(model)
    rows = model.network.get_input_embeddings().num_embeddings  # type: ignore[union-attr, operator]
    built_for = {"model": "pretrained", "task": "language-model", "input_shape": [_PLACES], "num_classes": rows}
    folder.mkdir()
    metadata = flatten_settings(config) | {"built_for": built_for, "base": {"template": template} if template else {}}
    save_weights(folder / "best.pt", model.state_dict(), metadata, {})
    return model
