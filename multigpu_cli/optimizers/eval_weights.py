"""The weights for use, where they are not those that take the steps: their moving average, schedule-free optimizers.

Schedule-free optimizers: Defazio et al. 2024, "The Road Less Scheduled". Such a class has methods `eval()` and
`train()`, which change the weights in place to those for use, and back.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class EMAModel(AveragedModel):
    """An exponential moving average of weights and buffers; the decay itself warms up as (1+n)/(10+n).

    Without that, a short run would be averaged with its random start (Adam's bias, seen in weights). The newest value
    is adopted for buffers that no checkpoint contains or whose shape changed, and for state that is not a tensor. The
    state dict is torch's; unlike torch's, the update does not wait for the device. `shared` parameters, which never
    change, are also those of the average, without a copy.
    """

    def __init__(self, model: nn.Module, decay: float, shared: Iterable[Tensor] = ()) -> None:
        super().__init__(nn.Module(), use_buffers=True)
        self.module = deepcopy(model, {id(parameter): parameter for parameter in shared})
        self.requires_grad_(False)
        self._decay = decay
        default = nn.Module.get_extra_state
        self._with_extra_state = [n for n, part in model.named_modules() if type(part).get_extra_state is not default]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module, skipped: Tensor | None = None) -> None:
        """Move towards the model unless `skipped` is () 1.0: then it weighs 0 (a GPU takes a kernel per tensor)."""
        skipped = torch.zeros(()) if skipped is None else skipped
        if skipped.is_cpu and skipped:
            return
        weight = self._weigh_and_count(skipped)
        pairs = chain(zip(self.module.parameters(), model.parameters(), strict=False), self._adopt_buffers(model))
        both = [  # a sharded tensor stands for the rows of this process
            [each.to_local() if hasattr(each, "to_local") else each for each in side]
            for side in zip(*(pair for pair in pairs if pair[0] is not pair[1]), strict=True)
        ]
        grouped: Any = torch._C._group_tensors_by_device_and_dtype(both, False)  # a kernel takes those of one format
        for (shadows, values), _ in grouped.values():
            if shadows[0].is_floating_point():
                _lerp(shadows, values, weight)
            else:
                torch._foreach_copy_(shadows, values)
        for shadow, value in zip(_other_buffers(self.module), _other_buffers(model), strict=False):
            shadow.copy_(torch.where(shadow.isfinite(), shadow, value))  # in masks: inf - inf is NaN
        for name in self._with_extra_state:
            extra_state = model.get_submodule(name).get_extra_state()
            self.module.get_submodule(name).set_extra_state(deepcopy(extra_state))

    def _adopt_buffers(self, model: nn.Module) -> Iterable[tuple[Tensor, Tensor]]:
        """Adopt the model's buffers that have no average; return the average's and the model's other buffers."""
        pairs: dict[int, tuple[Tensor, Tensor]] = {}  # a buffer with several names moves once
        for average, module in zip(self.module.modules(), model.modules(), strict=False):
            for name, value in module._buffers.items():
                shadow, volatile = average._buffers.get(name), name in module._non_persistent_buffers_set
                if volatile or shadow is None or value is None or shadow.shape != value.shape:
                    average._buffers[name] = None if value is None else value.clone()
                    average._non_persistent_buffers_set = module._non_persistent_buffers_set.copy()
                else:
                    pairs[id(shadow)] = shadow, value
        return pairs.values()

    def _weigh_and_count(self, skipped: Tensor) -> Tensor:
        """The weight of the newest, () float64 on the device of `skipped`, which is not asked for it."""
        self.n_averaged = count = self.n_averaged.to(skipped.device)
        decay = ((1 + count).double() / (10 + count)).clamp(max=self._decay) * (count > 0)
        count += 1 - skipped.long()
        return (1 - decay) * (1 - skipped)


def _lerp(shadows: list[Tensor], values: list[Tensor], weight: Tensor) -> None:
    wide = torch.promote_types(shadows[0].dtype, torch.float32)  # a weight in half precision would be rounded
    moved = [shadow.to(wide) for shadow in shadows]
    torch._foreach_lerp_(moved, [value.to(wide) for value in values], [weight.to(wide)] * len(moved))
    if moved[0] is not shadows[0]:
        torch._foreach_copy_(shadows, moved)


def _other_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Floating buffers but the statistics of BatchNorm, which are finite."""
    modules = (module for module in model.modules() if not isinstance(module, nn.modules.batchnorm._NormBase))
    return (buffer for module in modules for buffer in module.buffers(recurse=False) if buffer.is_floating_point())


def list_unsaved_parameters(model: nn.Module) -> list[Tensor]:
    """What no checkpoint of a model holds, and nothing changes: the weights beside which an adapter learns."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    return [p for p in model.parameters() if not p.requires_grad and id(p) not in saved]


def is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has both modes."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


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
