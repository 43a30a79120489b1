"""Whether weights, gradients and the optimizer's state fit one device: told before the model is moved there."""

from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.format import format_bytes
from multigpu_cli.optimizers.state_size import measure_state_bytes
from multigpu_cli.planning.memory import Memory
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.runtime.average import list_unsaved_parameters


def check_state_fits(spec: RunSpec, model: nn.Module, device: torch.device) -> None:
    """Compare what does not depend on the batch with the memory of a GPU.

    Raises:
        RequestError: it does not fit, whatever the batch.
    """
    if device.type != "cuda" or any(map(is_lazy, model.parameters())):
        return
    capacity = torch.cuda.get_device_properties(device).total_memory
    needed = forecast_state(model, spec.config, own_optimizer=bool(spec.user_objects and spec.user_objects.optimizer))
    if needed.total_bytes(0) <= capacity:
        return
    raise RequestError(
        f"--model {spec.model}: {format_bytes(needed.weights)} weights, {format_bytes(needed.gradients)} gradients and "
        f"{format_bytes(needed.optimizer)} optimizer state do not fit one GPU of {format_bytes(capacity)}",
        remedy=_suggest_sharding(spec),
    )


def refuse_single_samples(spec: RunSpec) -> None:
    """Refuse a run for which --multi-gpu auto chose ddp, and in which not even one sample fits.

    Raises:
        RequestError: it is such a run.
    """
    if spec.config.device.multi_gpu == "auto" and spec.placement.strategy == "ddp" and spec.plan.batches.workers > 1:
        raise RequestError(
            "out of memory with a single sample on each of several devices",
            remedy=f"{_suggest_sharding(spec)}; or --grad-checkpointing, or --amp bf16",
        )


def forecast_state(model: nn.Module, config: Config, *, own_optimizer: bool = False) -> Memory:
    """Bytes without activations.

    Args:
        own_optimizer: the optimizer is the user's, and its state unknown.
    """
    weights = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    averaged = 0 if config.optimizer.ema == "off" else weights
    if averaged and config.device.multi_gpu != "fsdp" and list_unsaved_parameters(model):
        averaged = gradients  # the average shares what never changes
    return Memory(
        weights=weights + averaged,
        gradients=gradients,
        optimizer=0 if own_optimizer else measure_state_bytes(model, config.optimizer),
        fixed=0,
        per_sample=0,
    )


def _suggest_sharding(spec: RunSpec) -> str:
    if spec.placement.shards or spec.config.device.multi_gpu == "fsdp":
        return (
            "several processes, which share them, also to try it: torchrun --nproc_per_node=N … --dry-run; and for a "
            "forecast CUDA_VISIBLE_DEVICES=, which measures one worker on the CPU"
        )
    return "--multi-gpu fsdp, which divides weights, gradients and the optimizer's state over several GPUs"
