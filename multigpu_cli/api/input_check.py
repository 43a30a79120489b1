"""Refuses a loop of the user's own in which every rank trains on the same batches."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from multigpu_cli.errors import RequestError


def check_inputs_differ(model: nn.Module) -> None:
    """Let the wrapped model's first forward pass for training compare its inputs over the ranks; later ones are free.

    The pass is collective already: all ranks reach it. Inputs without tensors are not compared.

    Raises:
        RequestError: (from that pass, on all ranks) some ranks got equal inputs.
    """

    def compare_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        handle.remove()
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, _hash_tensors((args, kwargs)))
        if None not in digests and len(set(digests)) < len(digests):
            raise RequestError(
                "the model's first batch is the same on several ranks: each rank trains on all samples, not on its "
                "share",
                remedy="DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset)), with "
                "loader.sampler.set_epoch(epoch) before each epoch; or same_inputs=True where that is meant",
            )

    handle = model.register_forward_pre_hook(compare_inputs, with_kwargs=True)


def _hash_tensors(inputs: Any) -> str | None:
    """SHA-256 of all tensors' types, shapes and bytes; None without one."""
    digest, found = hashlib.sha256(), False
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.numel():
            found = True
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else None
