"""A model.py and its token files as nanoGPT has them; without targets only the last place has logits."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def write_tokens(folder: Path) -> None:
    """train.bin and val.bin: uint16."""
    folder.mkdir()
    for name, count in (("train", 700), ("val", 150)):
        (np.arange(count) ** 2 % 13).astype(np.uint16).tofile(folder / f"{name}.bin")


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 16
    n_embd: int = 16
    bias: bool = False


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "mlp": nn.Sequential(
                    nn.Linear(config.n_embd, 32, config.bias), nn.GELU(), nn.Linear(32, config.n_embd)
                ),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]  # tied

    def hidden(self, idx: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](idx) + parts["wpe"](torch.arange(idx.size(1), device=idx.device))
        before = x.cumsum(1) / torch.arange(1, idx.size(1) + 1, device=idx.device).view(-1, 1)
        out: Tensor = parts["ln_f"](x + parts["mlp"](before))
        return out

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if targets is None:
            return self.lm_head(self.hidden(idx)[:, [-1], :]), None
        logits = self.lm_head(self.hidden(idx))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class LogitsOnly(GPT):
    """The same after the change that a task of logits wants."""

    def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.lm_head(self.hidden(idx))
        return logits


def gpt(num_classes: int) -> nn.Module:
    return GPT(GPTConfig(vocab_size=num_classes))


def logits_only(num_classes: int) -> nn.Module:
    return LogitsOnly(GPTConfig(vocab_size=num_classes))
