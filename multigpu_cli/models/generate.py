"""Text from a language model: one token after the other, each drawn from what the model expects."""

import torch
from torch import Tensor, nn


@torch.no_grad()  # not inference_mode: the model may be trained on, with what it keeps from these passes
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
    """Continue sequences.

    Args:
        model: (n, t) int64 → (n, t, vocabulary) logits, in evaluation mode.
        tokens: (n, t) int64, at least one each.
        count: how many tokens to add.
        length: how many of the last tokens the model can see.
        temperature: below 1 the likelier tokens come oftener; 0 always takes the likeliest.
        top_k: only so many of the likeliest are drawn from.
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
