"""The five operators of SyncBatchNorm that only CUDA builds of torch have, written out for simulated GPUs.

They follow torch's own use in torch/nn/modules/_functions.py; channels are the second dimension.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_KEPT: list[torch.library.Library] = []  # what is registered lasts as long as its library


def register() -> None:
    """From now on this process has them, and the collective that they need."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for function in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        library.impl(f"batch_norm_{function.__name__}", function)
    _KEPT.append(library)
    torch.cuda.is_current_stream_capturing = lambda: False  # into a CUDA graph
    for name in ("all_gather_single", "all_gather_into_tensor"):  # the group under the name of nccl has neither
        if hasattr(dist, name):
            setattr(dist, name, gather_rows)


def gather_rows(rows: Tensor, own: Tensor, group: Any = None, async_op: bool = False) -> None:
    """Everybody's (n,) in rank order, as (ranks · n,) or (ranks, n)."""
    each = rows.view(dist.get_world_size(group), -1)
    each.zero_()
    each[dist.get_rank(group)] = own.flatten()
    dist.all_reduce(rows, group=group)


def _over_samples(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).flatten(1).sum(1)


def _wide(channels: Tensor, like: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (like.ndim - 2))


def stats(inputs: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    each = inputs.transpose(0, 1).flatten(1)
    mean = each.mean(1)
    return mean, (((each - mean[:, None]) ** 2).mean(1) + eps).rsqrt()


def gather_stats_with_counts(
    inputs: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    share, total = (counts / counts.sum())[:, None], counts.sum()
    mean = (share * means).sum(0)
    var = (share * (inverses**-2 - eps + (means - mean) ** 2)).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(momentum * mean)
        running_var.mul_(1 - momentum).add_(momentum * var * total / (total - 1))
    return mean, (var + eps).rsqrt()


def elemt(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    scaled = (inputs - _wide(mean, inputs)) * _wide(inverse, inputs)
    scaled = scaled if weight is None else scaled * _wide(weight, inputs)
    return scaled if bias is None else scaled + _wide(bias, inputs)


def backward_reduce(
    gradient: Tensor, inputs: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Any, ...]:
    whole, beside = _over_samples(gradient), _over_samples(gradient * (inputs - _wide(mean, inputs)))
    return whole, beside, beside * inverse, whole.clone()


def backward_elemt(
    gradient: Tensor,
    inputs: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    whole: Tensor,
    beside: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    centred = (inputs - _wide(mean, inputs)) * _wide(inverse**2 * beside / total, inputs)
    scale = inverse if weight is None else inverse * weight
    return (gradient - _wide(whole / total, inputs) - centred) * _wide(scale, inputs)
