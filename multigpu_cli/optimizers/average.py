"""The exponential moving average of a model's weights."""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class EMAModel(AveragedModel):
    """An exponential moving average of weights and buffers; the decay itself warms up as (1+n)/(10+n).

    Without that, a short run would be averaged with its random start (Adam's bias, seen in weights). What modules hold
    beside tensors has no average: the newest is adopted. The state is torch's own; unlike torch's, the update does not
    wait for the device.

    Args:
        shared: parameters that never change: the average has the same ones, and no copy of them.
    """

    def __init__(self, model: nn.Module, decay: float, shared: Iterable[Tensor] = ()) -> None:
        super().__init__(nn.Module(), use_buffers=True)
        self.module = deepcopy(model, {id(parameter): parameter for parameter in shared})
        self.requires_grad_(False)
        self._decay = decay
        default = nn.Module.get_extra_state
        self._with_extra_state = [n for n, part in model.named_modules() if type(part).get_extra_state is not default]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        count = int(self.n_averaged)  # on the CPU, also where the model is on a GPU
        decay = min(self._decay, (1 + count) / (10 + count)) if count else 0.0
        pairs = zip(_tensors(self.module), _tensors(model), strict=False)  # as torch does
        for shadows, values in _by_format((shadow, value) for shadow, value in pairs if shadow is not value):
            if decay and shadows[0].is_floating_point():
                torch._foreach_lerp_(shadows, values, 1 - decay)
            else:
                torch._foreach_copy_(shadows, values)
        self.n_averaged += 1
        for name in self._with_extra_state:
            extra_state = model.get_submodule(name).get_extra_state()
            self.module.get_submodule(name).set_extra_state(deepcopy(extra_state))


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers; of sharded ones the rows of this process."""
    tensors = chain(model.parameters(), model.buffers())
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)


def _by_format(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Both grouped by dtype, as one kernel takes them."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for shadow, value in pairs:
        group = groups.setdefault(shadow.dtype, ([], []))
        group[0].append(shadow)
        group[1].append(value)
    return groups.values()
