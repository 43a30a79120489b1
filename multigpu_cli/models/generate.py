"""Generates text with a language model, token by token."""

import torch
from torch import Tensor, nn


@torch.no_grad()  # not inference_mode: training may continue with tensors that the model caches in these passes
def generate(
    model: nn.Module,
    tokens: Tensor,
    count: int,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Extend sequences by tokens that are sampled from the model's predictions.

    Args:
        model: (n, t) int64 → (n, t, vocabulary) logits, in evaluation mode.
        tokens: (n, t) int64, at least one each.
        count: number of tokens to add.
        length: the model's context length.
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: sample only from this many of the most likely tokens.
        generator: on the device of the model.

    Returns:
        (n, t + count) int64.
    """
    for _ in range(count):
        logits = model(tokens[:, -length:])[:, -1].float()
        if temperature == 0:
            following = logits.argmax(1, keepdim=True)
        else:
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            following = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens
