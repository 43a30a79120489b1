"""Number formats: autocast, loss scaling, and the commit of a step that skips itself where a gradient is not finite."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multigpu_cli.errors import RequestError

_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Format(NamedTuple):
    """A number format with its reason."""

    name: str
    because: str


def choose_format(wanted: str, device: torch.device) -> Format:
    """bf16 on CUDA devices that have it, fp16 on older ones, full precision on CPU, unless said otherwise.

    Raises:
        RequestError: fp16 on CPU.
    """
    if wanted == "fp16" and device.type == "cpu":
        raise RequestError("--amp fp16 needs a GPU: CPUs have no fast fp16", remedy="--amp bf16 or --amp off")
    if wanted != "auto":
        return Format(wanted, f"--amp {wanted}")
    if device.type != "cuda":
        return Format("off", "on CPU, fp32")
    with torch.cuda.device(device):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return Format("bf16", "the GPU has it") if native else Format("fp16", "the GPU has no bf16")


class Precision:
    """Autocast, scaled backward and the commit of one optimizer step."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self._dtype = _DTYPE.get(name)
        self._scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Backward of the loss, scaled for fp16."""
        self._scaler.scale(loss).backward() if self._scaler.is_enabled() else loss.backward()

    def commit(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], max_norm: float | None) -> Tensor:
        """Unscale, measure and clip the reduced gradient, and step; (2,): gradient norm, and 1 where it was skipped.

        No host sync: fused optimizers skip on the device when `found_inf` is 1. The norm is of the reduced gradient, so
        it is the same number, and the same decision, on every rank.
        """
        if self._scaler.is_enabled():
            self._scaler.unscale_(optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        skipped = (~torch.isfinite(norm)).float()
        if self._scaler.is_enabled():
            self._scaler.step(optimizer)
            self._scaler.update()
        else:
            optimizer.found_inf = skipped  # type: ignore[attr-defined]
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack([norm.float(), skipped])

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._scaler.load_state_dict(state)
