"""How many tokens a batch of texts has, counted while it is in host memory: for those on a device a step would wait."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multigpu_cli.runtime.model_call import IGNORED


class TokenCounts(NamedTuple):
    """Tokens of a batch.

    Attributes:
        real: without padding.
        learned: targets that count.
        places: with padding.
    """

    real: int
    learned: int
    places: int


def count_tokens(items: Sequence[Any], targets: Any) -> TokenCounts | None:
    """The tokens of a batch; None where its samples are no rows of `input_ids`.

    Args:
        items: the samples as the dataset handed them out.
        targets: of the batch that was made of them.
    """
    if not all(isinstance(item, Mapping) and "input_ids" in item for item in items):
        return None
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.dtype != torch.int64:
        return None
    real = sum(len(item["input_ids"]) for item in items)
    return TokenCounts(real, int((targets != IGNORED).sum()), targets.numel())
