"""Context managers that restore a module's buffers, or its training mode, on exit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the values of all buffers on exit, also of buffers that a forward pass replaced by another tensor.

    Buffers that are created in the meantime stay: a model that creates parts at its first forward pass keeps them, as
    it does when a checkpoint is loaded.
    """
    before = [
        (owner, name, buffer, buffer.clone())
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in before:
                owner._buffers[name] = buffer
                buffer.copy_(value)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode is restored on exit.

    Not `torch.inference_mode`: tensors that a model caches in such a pass (a table, a mask, a lazy layer's weights)
    could not be used in training afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def loss_mode(model: nn.Module) -> Iterator[None]:
    """Training mode, in which some networks return their loss, with BatchNorm and dropout as in evaluation."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    for module in model.modules():
        if isinstance(module, _NormBase | _DropoutNd):
            module.eval()
    try:
        with preserve_buffers(model):
            yield
    finally:
        for module, training in modes:
            module.training = training
