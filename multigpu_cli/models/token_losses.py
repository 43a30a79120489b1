"""The losses of single tokens from a network's hidden states, with the logits of one chunk of tokens at a time.

The logits of a whole micro-batch (tokens × vocabulary) are often the largest tensors of a fine-tuning: 4 GiB in float32
for 8,192 tokens of a vocabulary of 131,072. Only tokens with a target go through the head here. Where the sum of their
losses suffices, forward computes its gradients with it, chunk by chunk (as Hsu et al., "Liger Kernel: Efficient Triton
Kernels for LLM Training", 2024, do); otherwise backward computes the logits of a chunk again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, log_softmax, nll_loss
from torch.utils.checkpoint import checkpoint

from multigpu_cli.distributed.world import is_out_of_memory
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.model_call import IGNORED
from multigpu_cli.runtime.module_state import eval_mode

_LOGITS = 2**26
"""Logits of a chunk. Its borders depend on the micro-batch and the vocabulary alone, never on the workers."""

_TILE = 128  # rows that a GPU's kernels for matrix products take at a time
_PROBE = 11  # tokens
_Head = Callable[..., Tensor]  # of hidden states (k, width), and perhaps weights; returns logits


class TokenTargets(NamedTuple):
    """What a network is called with for the losses of tokens, in place of logits."""

    inputs: Any
    targets: Tensor  # (n, t) int64, -100 where none counts
    learned: int | None = None  # how many targets count at most, which the host knows; None: all may
    smoothing: float = 0.0  # of labels
    summed: bool = False  # whether the sum of the losses suffices


class TokenLosses(NamedTuple):
    """What a network returns for `TokenTargets`."""

    losses: Tensor  # (n, t) nats, in at least 32 bits, 0 where no target counts; or their sum, (1,)
    right: Tensor  # (n, t) bool, whether a target was the likeliest token; False in passes with gradients


class ComputesTokenLosses(nn.Module):
    """A network that is called with tokens for logits, and with `TokenTargets` for `TokenLosses`."""

    limits: tuple[int, int | None]  # tokens that it has an embedding for, and places; None: it names no such number


def compute_token_losses(
    head: _Head, vocabulary: int, hidden: Tensor, wanted: TokenTargets, *weights: Tensor
) -> TokenLosses:
    """The losses of the tokens that have a target, from hidden states (n, t, width).

    The head makes logits (k, vocabulary or more) of (k, width): of its own weights, or linear ones of those given here.
    Compiled, all at once: the compiler makes neither logits nor their gradients in 32 bits.
    """
    targets, rows = wanted.targets.flatten(), hidden.flatten(0, -2)
    places = _find_places(targets, wanted.learned)
    if places is not None:
        targets, rows = targets[places], rows.index_select(0, places)
    size = len(targets) if torch.compiler.is_compiling() else count_tokens_at_once(vocabulary)
    if wanted.summed and not wanted.smoothing and len(targets) > size and _can_differentiate(rows):
        total = _sum_losses(head, vocabulary, weights, rows, targets)
        return TokenLosses(total, torch.zeros_like(wanted.targets, dtype=torch.bool))
    score = partial(_score, lambda some: head(some, *weights), vocabulary, wanted.smoothing)
    *earlier, last = zip(rows.split(size), targets.split(size), strict=True)
    # not the last: backward begins with it, when it would have the logits of one chunk anyway
    scored = [*(checkpoint(score, *chunk, use_reentrant=False) for chunk in earlier), score(*last)]
    losses, right = (_spread(torch.cat(part), places, wanted.targets) for part in zip(*scored, strict=True))
    return TokenLosses(torch.stack([losses.sum()]) if wanted.summed else losses, right)


def score_logits(logits: Tensor, targets: Tensor) -> TokenLosses:
    """The losses of all tokens from their logits (n, t, vocabulary), and what was right also with gradients."""
    flat = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="none")
    return TokenLosses(losses.view_as(targets), logits.argmax(-1) == targets)


def _find_places(targets: Tensor, learned: int | None) -> Tensor | None:
    """Where the targets are that count, and perhaps some more; None for everywhere. The host does not wait for it."""
    if learned is None or learned >= len(targets):
        return None
    return torch.argsort((targets == IGNORED).byte(), stable=True)[: max(1, learned)]


def _score(head: _Head, vocabulary: int, smoothing: float, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(rows)
    if logits.shape[1] > vocabulary and torch.compiler.is_compiling() and not smoothing:  # kernels want whole rows
        logits = logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= vocabulary, -inf)
    else:
        logits = logits[:, :vocabulary]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
    right = torch.zeros_like(targets, dtype=torch.bool) if torch.is_grad_enabled() else logits.argmax(1) == targets
    return losses, right


def _find_dtype(rows: Tensor) -> torch.dtype:
    """The number format in which the head computes logits: that of autocast, or else of the hidden states."""
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype


def _can_differentiate(rows: Tensor) -> bool:
    """Not in fp16, where small gradients vanish before they are scaled. --exact keeps the rounding of plain passes."""
    plain = _find_dtype(rows) == torch.float16 or torch.are_deterministic_algorithms_enabled()
    return rows.requires_grad and not plain


def _sum_losses(head: _Head, vocabulary: int, weights: Sequence[Tensor], rows: Tensor, targets: Tensor) -> Tensor:
    """The sum (1,) of the losses, which has its gradients with it; those of weights are added in at least 32 bits."""
    size = count_tokens_at_once(vocabulary)
    size -= size % _TILE if size > _TILE else 0
    copies = {each.detach().to(_find_dtype(rows)).requires_grad_(each.requires_grad): each for each in weights}
    if weights:  # then the gradients of what is ignored are zero if it is, and logits need no mask
        rows = rows * (targets != IGNORED)[:, None]
    losses, of_rows, sums = [], [], dict[Tensor, Tensor]()
    for chunk, wanted in zip(rows.split(size), targets.split(size), strict=True):
        some = chunk.detach().requires_grad_()
        loss, found = _differentiate(head(some, *copies), vocabulary, wanted, masks=not weights)
        losses.append(loss)
        of_rows.append(found.pop(some))
        for weight, gradient in found.items():
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            sums[weight] = sums[weight].add_(gradient) if weight in sums else gradient.to(dtype, copy=True)
    gradients, learning = [torch.cat(of_rows), *sums.values()], [copies.get(each, each) for each in sums]
    total: Tensor = _Differentiated.apply(torch.stack(losses).sum(0, keepdim=True), gradients, rows, *learning)
    return total


@torch.no_grad()
def _differentiate(
    logits: Tensor, vocabulary: int, targets: Tensor, *, masks: bool
) -> tuple[Tensor, dict[Tensor, Tensor]]:
    """The sum () of the losses, and its gradients by what learns of that from which the logits were computed."""
    if logits.shape[1] > vocabulary:
        logits.detach()[:, vocabulary:] = -inf
    scores = log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    loss = nll_loss(scores, targets, ignore_index=IGNORED, reduction="sum")
    target = targets.clamp(min=0)[:, None]
    likely = scores.gather(1, target).expm1().to(logits.dtype)  # rounded only here: 1 - p of a likely target is small
    gradient = torch.exp(scores, out=scores if scores.dtype == logits.dtype else torch.empty_like(logits))
    gradient.scatter_(1, target, likely)
    if masks:
        gradient *= (targets != IGNORED).to(gradient.dtype)[:, None]
    nodes: list[Any] = [logits.grad_fn]
    for node in nodes:  # which grows meanwhile
        nodes += dict.fromkeys(each for each, _ in node.next_functions if each and each not in nodes)
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    found = torch.autograd.grad(logits, leaves, gradient, materialize_grads=True)
    return loss, dict(zip(leaves, found, strict=True))


class _Differentiated(Function):
    """A number whose gradients are known: backward multiplies them."""

    @staticmethod
    def forward(context: Any, value: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        context.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(factor * each for each in context.saved_tensors)


def _spread(values: Tensor, places: Tensor | None, targets: Tensor) -> Tensor:
    """The values at their places in the shape of all targets, and zeros elsewhere."""
    if places is not None:
        values = values.new_zeros(targets.numel()).index_copy(0, places, values)
    return values.view_as(targets).clone()  # FSDP's hooks want no views


def count_tokens_at_once(vocabulary: int) -> int:
    """How many tokens' logits are in memory at a time."""
    return max(1, _LOGITS // vocabulary)


def find_difference(model: nn.Module, vocabulary: int, device: torch.device, places: int | None = None) -> str:
    """Compare the token losses of a network with those of its logits, on a few tokens.

    Returns why they can't be used, "" if they are the same. The vocabulary is that of the embedding; a text has at most
    so many `places`.
    """
    tokens = (torch.arange(min(_PROBE, places or _PROBE), device=device) * 7 % vocabulary)[None]
    targets = tokens.roll(-1).masked_fill(tokens % 3 == 0, IGNORED)
    with eval_mode(model), torch.no_grad():
        logits = model(tokens)
        try:
            found = model(TokenTargets(tokens, targets, int((targets != IGNORED).sum()))).losses
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            if is_out_of_memory(error):  # of this rank alone: the others would sum in another order
                raise
            return (str(error).splitlines() or [type(error).__name__])[0]
    expected = score_logits(logits, targets).losses
    close = torch.finfo(logits.dtype).eps ** 0.5
    same = torch.allclose(found, expected, rtol=close, atol=close)
    return "" if same else f"the losses differ by {float((found - expected).abs().max()):.2g}"


_FIRST, _SECOND = 5, 6  # tokens of two texts
_LEAK = 1e-3  # of the change that the changed text itself shows
_AHEAD = 1e-4  # of the change at the changed token; of a network that has learned nothing yet it is small


def check_causal(model: nn.Module, vocabulary: int, device: torch.device, places: int | None = None) -> None:
    """Change the last token: the logits before it, (1, t, vocabulary), which foretell it, may not move."""
    tokens = (torch.arange(min(_FIRST + _SECOND, places or _FIRST + _SECOND), device=device) * 7 % vocabulary)[None]
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1 + vocabulary // 2) % vocabulary
    with eval_mode(model), torch.no_grad():
        logits = model(tokens)
        moved = (model(other) - logits).float().abs()[0]
    leak = float(moved[:-1].max() / moved[-1].max()) if len(moved) > 1 else 0.0
    if leak > max(_AHEAD, 2 * torch.finfo(logits.dtype).eps):
        raise RequestError(
            f"--model: this network sees the tokens that it has to predict: where the last one changes, the logits "
            f"before it move by {leak:.2g} of what its own do, as in an encoder (BERT)",
            remedy="a model made to write text, whose architecture ends in ForCausalLM, such as Llama, Qwen or GPT-2",
        )


def check_packing(model: nn.Module, vocabulary: int, device: torch.device) -> None:
    """Refuse a network in which packed texts see each other: change one text, and compare the logits of the others.

    It is tried with one row of two texts, and with two rows: libraries take other kernels for a lone row.
    """
    leaks = torch.stack([_measure_leak(model, vocabulary, device, rows) for rows in (1, 2)])
    if not bool(leaks.max() < _LEAK):  # also if it is NaN
        raise RequestError(
            f"--packing on: in this network packed samples see each other: where one changes, the logits of another "
            f"move by {leaks.max():.2g} of what its own do",
            remedy="--packing off, or another model.args.attention",
        )


def _measure_leak(model: nn.Module, vocabulary: int, device: torch.device, rows: int) -> Tensor:
    """Return how far logits of other texts move, as a share () of how far those of the changed text do."""
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)]).repeat(rows, 1).to(device)
    texts = (positions == 0).flatten().cumsum(0).view_as(positions)  # the number of each token's text, from 1
    tokens = (torch.arange(positions.numel(), device=device) * 7 % vocabulary).view_as(positions)
    changed, leaks = (tokens + 1 + vocabulary // 2) % vocabulary, []
    with eval_mode(model):
        plain = model({"input_ids": tokens, "position_ids": positions}).float()
        for text in (texts == 1, texts == 2 * rows):  # the first and the last: a leak may go either way
            logits = model({"input_ids": torch.where(text, changed, tokens), "position_ids": positions}).float()
            moved = (logits - plain).abs()
            leaks.append(moved[~text].max() / moved[text].max())
    return torch.stack(leaks).max()
