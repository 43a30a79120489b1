"""What a forward pass of a language model keeps for backward, computed from shapes alone: on tensors without memory."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from multigpu_cli.models.token_losses import TokenTargets


def count_kept_bytes(model: nn.Module, sizes: tuple[int, ...], tokens: int, dtype: torch.dtype | None) -> list[int]:
    """Bytes that forward saves for backward, beside parameters, buffers and inputs, for so many rows each.

    Rows count as packed ones, whose attention has a mask. It counts as torch's fused kernel for CPUs keeps it (inputs,
    output and log-sum), as those for GPUs do. Under autocast the copies of frozen weights count: their layers keep them
    for the gradient of their inputs.

    Args:
        model: a network of `hugging_face.Logits` on the meta device; it is used up.
        sizes: rows of a micro-batch.
        tokens: of a row.
        dtype: of autocast, None without.

    Raises:
        Exception: whatever the network raises where it asks for the values of tensors, as mixtures of experts do.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        _give_fake_tensors(model)
        model.train()
        return [_count(model, rows, tokens, dtype) for rows in sizes]


def _give_fake_tensors(model: nn.Module) -> None:
    """Put tensors that pretend to lie in host memory in the place of those on the meta device; ties stay."""
    known: dict[int, Tensor] = {}
    for module in model.modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if id(tensor) not in known:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                learns = isinstance(tensor, nn.Parameter)
                known[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if learns else fake
            setattr(module, name, known[id(tensor)])


def _count(model: nn.Module, rows: int, tokens: int, dtype: torch.dtype | None) -> int:
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    inputs = {"input_ids": ids, "position_ids": torch.arange(tokens).expand(rows, -1).contiguous()}
    known = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers(), *inputs.values()]}
    kept: dict[int, Tensor] = {}  # the tensors themselves, so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            kept[_storage(tensor)] = tensor
        return tensor

    autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    with saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        model(TokenTargets(inputs, ids))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
