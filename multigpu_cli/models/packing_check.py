"""What the tokens of a row see of each other in a network: those that follow, or another text's."""

import torch
from torch import Tensor, nn

from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.preserve_module_state import eval_mode

_FIRST, _SECOND = 5, 6  # tokens of two texts
_LEAK = 1e-3  # of the change that the changed text itself shows
_AHEAD = 1e-4  # of the change at the changed token; of a network that has learned nothing yet it is small


def check_causal(model: nn.Module, vocabulary: int, device: torch.device, places: int | None = None) -> None:
    """Change the last token: the logits before it, which foretell it, may not move.

    Args:
        model: (1, t) int64 → logits (1, t, vocabulary).
        places: tokens of a text at most.

    Raises:
        RequestError: they move.
    """
    tokens = (torch.arange(min(_FIRST + _SECOND, places or _FIRST + _SECOND), device=device) * 7 % vocabulary)[None]
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1 + vocabulary // 2) % vocabulary
    with eval_mode(model), torch.no_grad():
        logits = model(tokens)
        moved = (model(other) - logits).float().abs()[0]
    leak = float(moved[:-1].max() / moved[-1].max()) if len(moved) > 1 else 0.0
    if leak > max(_AHEAD, 2 * torch.finfo(logits.dtype).eps):
        raise RequestError(
            f"--model: this network sees the tokens that it is to foretell: where the last one changes, the logits "
            f"before it move by {leak:.2g} of what its own do, as in an encoder (BERT)",
            remedy="a model made to write text, whose architecture ends in ForCausalLM, such as Llama, Qwen or GPT-2",
        )


def check_packing(model: nn.Module, vocabulary: int, device: torch.device) -> None:
    """Change one of two packed texts: the other's logits may not move.

    Args:
        model: mapping with input_ids and position_ids, (1, t) int64 → logits (1, t, vocabulary).

    Raises:
        RequestError: they move, so that texts have to stand alone.
    """
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None].to(device)
    tokens = (torch.arange(_FIRST + _SECOND, device=device) * 7 % vocabulary)[None]

    def run(changed: slice) -> Tensor:
        ids = tokens.clone()
        ids[:, changed] = (ids[:, changed] + 1 + vocabulary // 2) % vocabulary
        logits: Tensor = model({"input_ids": ids, "position_ids": positions})
        return logits.float()

    first, second = slice(0, _FIRST), slice(_FIRST, None)
    with eval_mode(model), torch.no_grad():
        plain = run(slice(0, 0))
        moved = [(run(changed) - plain).abs() for changed in (first, second)]
    leaks = [
        float(change[:, other].max() / change[:, own].max())
        for change, own, other in ((moved[0], first, second), (moved[1], second, first))
    ]
    if not max(leaks) < _LEAK:  # also where it is NaN
        raise RequestError(
            f"--packing on: this network lets packed texts see each other: where one changes, the logits of another "
            f"move by {max(leaks):.2g} of what its own do",
            remedy="--packing off, or another model.args.attention",
        )
