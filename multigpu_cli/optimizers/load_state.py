"""Loads an optimizer's state with the formats in which it was saved, and adapts it to this device."""

from typing import Any

import torch
from torch import Tensor

from multigpu_cli.runtime.tensor_tree import TensorPath, map_tensors


class StateLoader:
    """What an optimizer's `load_state_dict` does beside torch's own.

    torch gives every tensor but "step" the dtype of its parameter, so that counts would become fractions, and sums in
    float64 lose their last bits; these get their own dtype again. Of a text it makes a generator (torch 2.13), so what
    is no tensor is taken as it was saved. A checkpoint may also come from another device, so fused kernels and strides
    become those of this one: fused kernels on CPU traverse weights and state in memory order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._saved: dict[str, Any] = {}
        optimizer.register_load_state_dict_pre_hook(self._keep)
        optimizer.register_load_state_dict_post_hook(self._adapt)

    def _keep(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self._saved = state

    def _adapt(self, optimizer: torch.optim.Optimizer) -> None:
        numbers = [number for group in self._saved["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states, self._saved = self._saved["state"], {}
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in states:
                optimizer.state[parameter] = _restore(optimizer.state[parameter], states[number], parameter)
        if "fused" in optimizer.defaults:
            for group in optimizer.param_groups:
                group["fused"] = optimizer.defaults["fused"]


def _restore(loaded: Any, saved: Any, parameter: Tensor) -> Any:
    """A parameter's saved state on the device of the loaded one, with the parameter's strides."""

    def restore(path: TensorPath, value: Tensor) -> Tensor:
        found = loaded
        for key in path:
            found = found[key]
        if found.dtype != value.dtype and path[-1:] != ("step",):
            found = value.to(found.device, copy=True)
        if found.shape == parameter.shape and found.stride() != parameter.stride():
            found = torch.empty_like(parameter, dtype=found.dtype).copy_(found)
        return found  # type: ignore[no-any-return]

    return map_tensors(saved, restore)
