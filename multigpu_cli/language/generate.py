"""Generates text with a language model, token by token."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

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
        tokens = torch.cat([tokens, _draw_tokens(logits, temperature, top_k, generator)], dim=1)
    return tokens


@torch.no_grad()
def answer_prompt(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    length: int,
    ends: Collection[int],
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    agree: Callable[[int], int] = lambda token: token,
) -> list[int]:
    """The tokens that a network of transformers adds to a prompt, up to an end, which is the last of them.

    Args:
        model: mapping with input_ids and position_ids, (1, t) int64 → logits (1, t, vocabulary), in evaluation mode;
            where it has a `make_cache`, keys and values of earlier places are computed once.
        prompt: tokens, at least one.
        count: number of tokens to add at most.
        length: places that the model knows; it stops at the last of them.
        ends: tokens at which generation stops.
        temperature, top_k, generator: as for `generate`.
        agree: called with each token; returns the one to go on with. Processes that run the model together have to
            take the same.
    """
    device = next(model.parameters()).device
    cache: dict[str, Any] = getattr(model, "make_cache", dict)()
    answer: list[int] = []
    while len(answer) < min(count, length - len(prompt)) and not (answer and answer[-1] in ends):
        new = answer[-1:] if answer and cache else [*prompt, *answer]
        places = range(len(prompt) + len(answer) - len(new), len(prompt) + len(answer))
        inputs: dict[str, Any] = {"input_ids": new, "position_ids": list(places)}
        inputs = {name: torch.tensor([values], device=device) for name, values in inputs.items()}
        if cache:
            inputs |= cache | {"use_cache": True}
        logits = model(inputs)[:, -1].float()
        if any(each.get_seq_length() <= places[-1] for each in cache.values()):  # the network has another kind of state
            cache = {}
        answer.append(agree(int(_draw_tokens(logits, temperature, top_k, generator))))
    return answer


def _draw_tokens(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """The following token of each of (n, vocabulary) logits: (n, 1) int64."""
    if temperature == 0:
        return logits.argmax(1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)
