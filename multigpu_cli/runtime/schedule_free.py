"""Schedule-free optimizers: their weights for use are others than those that take the steps.

Defazio et al. 2024, "The Road Less Scheduled". Such a class has methods `eval()` and `train()`, which change the
weights in place to those for use, and back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has both modes."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def use_eval_weights(optimizer: torch.optim.Optimizer) -> None:
    """Put the weights for use into the parameters, for good; nothing changes where these learn themselves."""
    if is_schedule_free(optimizer):
        optimizer.eval()  # type: ignore[attr-defined]


@contextmanager
def eval_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The parameters have the weights for use inside the context, and afterwards their own bits again.

    They are copied for that time: `train()` after `eval()` rounds, and when a run is evaluated must not change it.
    """
    if not is_schedule_free(optimizer):
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter, value in zip(parameters, own, strict=True):
                parameter.copy_(value)
