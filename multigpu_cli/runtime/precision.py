"""Mixed precision: autocast, loss scaling, and the optimizer step, which is skipped for non-finite gradients."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from multigpu_cli.distributed.world import World, all_gather
from multigpu_cli.errors import RequestError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PrecisionChoice(NamedTuple):
    """A number format with its reason."""

    name: str
    reason: str


def choose_precision(wanted: str, device: torch.device) -> PrecisionChoice:
    """The requested format; for "auto" bf16 on CUDA devices that support it, fp16 on older ones, fp32 on CPU."""
    if wanted == "fp16" and device.type == "cpu":
        raise RequestError("--amp fp16 needs a GPU: CPUs have no fast fp16", remedy="use --amp bf16 or --amp off")
    if wanted != "auto":
        return PrecisionChoice(wanted, f"--amp {wanted}")
    if device.type != "cuda":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        hint = "; this CPU has bf16 instructions for --amp bf16" if native else ""
        return PrecisionChoice("off", f"on CPU, fp32{hint}")
    with torch.cuda.device(device):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    if native:
        return PrecisionChoice("bf16", "the GPU supports it")
    return PrecisionChoice("fp16", "the GPU does not support bf16")


def agree_on_precision(wanted: str, world: World, devices: Sequence[torch.device]) -> PrecisionChoice:
    """Choose the same format on every rank: fp16 if one of all GPUs, also of this process's, does not support bf16."""
    own = choose_precision(wanted, world.device)
    if wanted != "auto":
        return own
    old = [str(device) for device in devices if choose_precision(wanted, device).name == "fp16"]
    counts = all_gather(world, torch.tensor([len(old)], device=world.device))
    old += [f"rank {rank}'s GPU" for rank, count in enumerate(counts) if int(count)]
    return PrecisionChoice("fp16", f"{old[0]} does not support bf16") if old and own.name == "bf16" else own


_NOTHING = nullcontext()
_threshold = torch.ops.aten.threshold_backward.default  # of value, compared and limit: 0 if compared ≤ limit, or value


class Precision:
    """Autocast, scaled backward, clipping and the optimizer step."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.keeps_casts = True  # autocast keeps weights that it has cast until the pass ends, for another use of them
        self._dtype = DTYPES.get(name)
        self._scaler, self._scales = torch.amp.GradScaler(device.type, enabled=name == "fp16"), name == "fp16"
        self._key: tuple[float, torch.dtype] | None = None
        self._one = torch.ones((), device=device)

    def autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return _NOTHING
        return torch.autocast(self.device.type, dtype=self._dtype, cache_enabled=self.keeps_casts)

    @cached_property
    def autocast_of_pass(self) -> AbstractContextManager[Any]:
        """`autocast` for passes that are not within each other: to make it takes the host as long as two kernels."""
        return self.autocast()

    def backward(self, loss: Tensor, factor: float = 1.0) -> None:
        """Backward of the loss () times the factor, scaled for fp16."""
        if self._scales or type(loss) is not Tensor or loss.ndim:
            self._scaler.scale(loss * factor).backward()
            return
        key = (factor, loss.dtype)
        if key != self._key:  # the factor is passed as the gradient of the loss, which saves a multiplication
            self._key, self._factor = key, torch.full((), factor, dtype=loss.dtype, device=self.device)
        # The core of `loss.backward`, which would import sympy to compare two shapes.
        _engine_run_backward((loss,), (self._factor,), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def clip_and_step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[Tensor],
        max_norm: float | None,
        total_norm: Callable[[Tensor], Tensor] | None = None,
        factor: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Unscale and clip the reduced gradient, and step; returns the gradient norm (), and 1 if skipped, else 0, ().

        There is no host sync: on a GPU, fused optimizers skip on the device if `found_inf` is 1. The norm is that of
        the reduced gradient times the `factor` () float64, so the number and the decision are the same on every rank.
        `total_norm` computes the norm of the full gradient from that of these gradients, if they are only a shard.
        """
        scaled, on_host = self._scales, self.device.type == "cpu"
        fused = getattr(optimizer, "_step_supports_amp_scaling", False) and not scaled
        if scaled:
            self._scaler.unscale_(optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = _norm(gradients)
        norm = total_norm(norm) if total_norm else norm
        in_kernel = fused and norm.dtype == torch.float32  # the fused kernel divides, which saves passes over gradients
        if factor is not None:
            norm = norm * factor.to(norm.dtype)
        # 1 for NaN and infinity, by one kernel: NaN is not below a threshold
        skipped = _threshold(self._one, norm, torch.finfo(norm.dtype).max).float()
        divisor = None if max_norm is None else _find_divisor(norm, max_norm)
        if factor is not None and in_kernel:
            divisor = (1.0 if divisor is None else divisor) / factor.to(norm.dtype)
        elif factor is not None:
            multiply_gradients(parameters, factor)
        if divisor is not None and on_host and float(divisor) == 1.0:
            divisor = None
        if in_kernel:
            optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        elif divisor is not None:
            torch._foreach_div_(gradients, divisor)
        if scaled:
            self._step_scaled(optimizer, skipped)
        elif fused and not on_host:
            optimizer.found_inf = skipped  # type: ignore[attr-defined]
            optimizer.step()
        elif not skipped:  # on a GPU the host waits here, since the user's own optimizer can't skip on the device
            optimizer.step()
        for parameter in parameters:  # like optimizer.zero_grad(), without its hooks, which take 30 µs
            parameter.grad = None
        return norm, skipped

    def _step_scaled(self, optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
        """Step through the GradScaler of fp16, and adapt its scale; `skipped` () is 1 if no rank may step."""
        overflows = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for overflow in overflows.values():  # torch's flag covers this rank's gradients, which may be a shard
            overflow.copy_(skipped)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._scaler.load_state_dict(state)


def at_least_float32(values: Tensor) -> Tensor:
    """The values in 32 bits or more: a sum in half precision would lose the small ones."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def multiply_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the gradients by the factor () float64, with one kernel for each of their number formats."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    for number in {gradient.dtype for gradient in gradients}:  # a kernel takes tensors and factor of one dtype
        same = [gradient for gradient in gradients if gradient.dtype == number]
        torch._foreach_mul_(same, factor.to(torch.promote_types(number, torch.float32)))


def _find_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what gradients of total norm `norm` () are divided by to clip them: at least 1, as clip_grad_norm_."""
    # dividing by max_norm = 1 would change nothing and cost a kernel
    return (norm + 1e-6 if max_norm == 1 else (norm + 1e-6) / max_norm).clamp_(min=1.0)


def _norm(gradients: list[Tensor]) -> Tensor:
    """The total norm (); get_total_norm groups them first, which for a small model takes longer than the arithmetic."""
    if len({(gradient.device, gradient.dtype) for gradient in gradients}) != 1:
        return torch.nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # type: ignore[no-any-return]
