"""Builds networks on the meta device, where tensors have shapes and no memory: for ranks that are sent their weights.

Nothing is initialised there: some of torch's initialisers return at once for such tensors, and leave them as they are.
"""

import gc
from collections.abc import Callable
from copy import deepcopy
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

META = torch.device("meta")


def build_on_meta(build: Callable[[], nn.Module]) -> tuple[nn.Module | None, str]:
    """Call a factory on the meta device.

    Returns:
        The network, or None with the reason why it would not be what the factory builds elsewhere.
    """
    before, earlier = torch.get_rng_state(), _list_meta_tensors()
    try:
        with META:
            model = build()
    except Exception as error:  # the user's own code may raise anything; if not for this, the whole build raises it too
        return None, f"on the meta device its factory raises {type(error.__cause__ or error).__name__}"
    if any(map(is_lazy, model.parameters())):
        return None, "its first pass creates weights"
    gc.collect()  # what it built by the way
    for buffer in filter(Tensor._is_view, model.buffers()):
        # such as a mask with new dims: nobody need give a value to what it is a view of
        torch.utils.swap_tensors(buffer, torch.empty_like(buffer))
    if not torch.equal(before, torch.get_rng_state()):
        return None, "its factory draws random numbers on a device of its own choice"
    if _has_other_tensors(model, earlier):
        return None, "it has tensors that are neither parameters nor buffers"
    return model, ""


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy of the network whose parameters and buffers have no memory."""
    memory: dict[int, Tensor] = {id(buffer): buffer.to(META) for buffer in model.buffers()}
    for parameter in model.parameters():
        memory[id(parameter)] = nn.Parameter(parameter.to(META), requires_grad=parameter.requires_grad)
    return deepcopy(model, memory)


def find_unsaved_tensors(model: nn.Module) -> list[str]:
    """The names of parameters and buffers that are in no state dict, and so in no checkpoint."""
    saved = model.state_dict(keep_vars=True).keys()
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return [name for name, _ in tensors if name not in saved]


def _has_other_tensors(model: nn.Module, earlier: list[Tensor]) -> bool:
    """Whether there are new tensors on the meta device, wherever they are kept, that nobody would give a value."""
    known = set(map(id, chain(model.parameters(), model.buffers(), earlier)))
    return any(id(tensor) not in known for tensor in _list_meta_tensors())


def _list_meta_tensors() -> list[Tensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.is_meta]
