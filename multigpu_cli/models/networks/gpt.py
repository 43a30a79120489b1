"""A GPT-2 style decoder: each position of a sequence predicts the next token from those before it.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, with the initialization of its
section 2.3. GPT-2's smallest model (124M parameters) is depth 12, heads 12, width 768 on 1,024 tokens.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from multigpu_cli.errors import RequestError
from multigpu_cli.models.token_losses import ComputesTokenLosses, TokenTargets, compute_token_losses

_SPREAD = 0.02  # standard deviation of the initial weights
_ALIGNMENT = 64  # numbers: fast kernels for matrix products on a GPU want rows that begin at multiples


class Attention(nn.Module):
    """Causal self-attention with several heads: (n, t, width) → (n, t, width)."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        by_head = self.query_key_value(x).unflatten(2, (3, self.heads, -1)).transpose(1, 3)  # (n, heads, 3, t, size)
        query, key, value = by_head.unbind(2)
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a perceptron, each with layer norm before it and a residual connection around it."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, dropout, bias)
        self.norm_mlp = nn.LayerNorm(width, bias=bias)
        self.widen = nn.Linear(width, 4 * width, bias=bias)
        self.narrow = nn.Linear(4 * width, width, bias=bias)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        out: Tensor = x + self.dropout(self.narrow(self.activation(self.widen(self.norm_mlp(x)))))
        return out


class GPT(ComputesTokenLosses):
    """A GPT for sequences of input_shape[0] tokens out of num_classes.

    Tokens (n, t) int64 → logits (n, t, vocabulary), for t up to the length it was built for.

    The output layer shares the weights of the token embedding. For the product on a GPU they are padded, but not with
    --exact, which keeps the rounding of the plain product. Weights and checkpoints have the vocabulary's size.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        depth: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise RequestError(
                f"model.args.width: {width} is not divisible by {heads} heads", remedy=f"use a multiple of {heads}"
            )
        if len(input_shape) != 1:
            raise RequestError(
                f"--model gpt: samples of shape {input_shape} are not sequences of tokens", remedy="use --data text"
            )
        self.length, self.limits = input_shape[0], (num_classes, input_shape[0])
        self.tokens, self.places = nn.Embedding(num_classes, width), nn.Embedding(self.length, width)
        self.dropout = nn.Dropout(dropout)
        blocks = [Block(width, heads, dropout, bias) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, bias=bias)
        self.apply(_initialise)
        for block in blocks:  # scaled so that 2·depth additions keep the variance of the residual stream
            for added in (block.attention.out, block.narrow):
                nn.init.normal_(added.weight, std=_SPREAD / sqrt(2 * depth))

    def forward(self, tokens: Tensor | TokenTargets) -> Any:
        """Logits; or, called with `TokenTargets`, the losses of tokens."""
        hidden = self._run_blocks(tokens.inputs if isinstance(tokens, TokenTargets) else tokens)
        weight, vocabulary = self._pad_head(hidden), self.limits[0]
        if isinstance(tokens, TokenTargets):
            return compute_token_losses(linear, vocabulary, hidden, tokens, weight)
        logits = linear(hidden, weight)
        return logits if len(weight) == vocabulary else logits[..., :vocabulary].contiguous()  # FSDP wants no views

    def _run_blocks(self, tokens: Tensor) -> Tensor:
        """(n, t) → (n, t, width)"""
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        hidden: Tensor = self.norm(self.blocks(self.dropout(self.tokens(tokens) + places)))
        return hidden

    def _pad_head(self, hidden: Tensor) -> Tensor:
        """The weight of the output layer, perhaps with rows of zeros beyond the vocabulary."""
        weight, spare = self.tokens.weight, -self.limits[0] % _ALIGNMENT
        if not spare or not hidden.is_cuda or torch.are_deterministic_algorithms_enabled():
            return weight
        return pad(weight, (0, 0, 0, spare))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_SPREAD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
