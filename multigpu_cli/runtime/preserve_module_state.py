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
    """Put back the values of all buffers, also of those that a forward pass bound to another tensor.

    Buffers that come into being meanwhile stay: a network that makes some of its parts at its first forward pass has
    them from then on, as it has when a checkpoint is loaded into it.
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
    """Evaluation mode, without gradients; each module is in its own mode again afterwards.

    Not `torch.inference_mode`: what a network keeps from such a pass (a table, a mask, a lazy layer's weights) could
    take no part in training any more.
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
