"""Tell from config.json alone whether a pretrained model fits here, before its weights and the data are downloaded."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.distributed.placement import cuda_devices, usable_gpus
from multigpu_cli.errors import RequestError
from multigpu_cli.language.model_folder import find_model_folder, find_places, has_weights, load_config
from multigpu_cli.language.rules import is_pretrained
from multigpu_cli.models.build import build_model, build_on_meta, find_adapter
from multigpu_cli.models.token_losses import TokenTargets
from multigpu_cli.monitor.format import format_bytes
from multigpu_cli.planning.memory import Memory, fit_line
from multigpu_cli.run.request.checks import forecast_state
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.runtime.precision import DTYPES, choose_precision

FILLED = 0.9  # share of a device's memory: the allocator and kernels take some


@dataclass(frozen=True)
class ConfigEstimate:
    """What a training takes of each device, computed and not measured."""

    folder: Path
    reason: str
    parameters: int
    trained: int
    memory: Memory
    rows: int  # of a micro-batch
    tokens: int  # of a row
    activations: str  # what backward needs, in words; empty where it is counted in `memory`
    device: str
    capacity: int | None  # bytes of the GPU, None without one
    quantized: bool

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and the optimizer's state."""
        return self.memory.weights + self.memory.gradients + self.memory.optimizer

    @property
    def fits(self) -> int | None:
        """Rows of the largest micro-batch, as far as the activations could be counted."""
        if self.capacity is None or self.activations:
            return None
        return self.memory.largest_batch(FILLED * self.capacity)

    def describe(self) -> Iterator[str]:
        """What a plan says of it, in notes."""
        yield f"{self.reason}: nothing is measured, and times are not told"
        if self.activations:
            yield f"what a micro-batch keeps for backward is not counted: {self.activations}"
        else:
            yield (
                f"what backward needs is computed from shapes, for rows of {self.tokens:,} tokens; kernels and the "
                "gradients of activations take some more"
            )
        if self.quantized:
            yield "the weights are counted whole: with model.args.quantize those of linear layers take 4 bits each"
        if self.capacity and self.state_bytes > FILLED * self.capacity:
            yield f"this does not fit {format_bytes(self.capacity)}: --multi-gpu fsdp divides it over the workers"


def estimate_training(config: Config) -> ConfigEstimate | None:
    """What a training of --model-dir would take, if its weights or its data are not there yet; else None."""
    if not is_pretrained(config) or config.model.dir is None:
        return None
    folder = find_model_folder(config.model.dir)
    lacks_data = config.data.dir is None and config.data.name in ("chat", SETTINGS["data"].default)
    if has_weights(folder) and not lacks_data:
        return None
    reason = "there is no --data-dir" if has_weights(folder) else f"{folder} has no weights"
    device = usable_gpus(config.device)
    place = cuda_devices(device[:1])[0] if device else torch.device("cpu")
    model, tokens = _build_on_meta(config), config.data.max_length or find_places(load_config(folder))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    memory = forecast_state(model, config, FromConfig())
    activations = "the model states no context length, and there is no --max-length"
    if tokens:
        dtype = DTYPES.get(choose_precision(config.precision.amp, place).name)
        memory, activations = _add_activations(memory, model, tokens, dtype, pairs=config.task.name == "dpo")
    return ConfigEstimate(
        folder,
        reason,
        parameters=parameters,
        trained=trained,
        memory=memory,
        rows=config.batch.size if isinstance(config.batch.size, int) else 1,
        tokens=tokens or 0,
        activations=activations,
        device=torch.cuda.get_device_name(place) if device else "no GPU here",
        capacity=torch.cuda.get_device_properties(place).total_memory if device else None,
        quantized=config.model.args.get("quantize", "none") != "none",
    )


def _build_on_meta(config: Config) -> nn.Module:
    """The network that would be trained, with its adapter, on the meta device: it takes no memory."""
    offered = {"model_dir": config.model.dir, "seed": config.reproducibility.seed}
    model, reason = build_on_meta(lambda: build_model(config.model, "pretrained", offered, adapt=find_adapter(config)))
    if model is None:
        problem = f"--model-dir {config.model.dir}: its size can't be told from config.json alone: {reason}"
        raise RequestError(problem, remedy="the folder with the model's weights, and --data-dir")
    return model


def _add_activations(
    memory: Memory, model: nn.Module, tokens: int, dtype: torch.dtype | None, *, pairs: bool
) -> tuple[Memory, str]:
    """Return the memory with the activations that backward keeps; or unchanged, and the reason why they are unknown."""
    each = 2 if pairs else 1  # rows of a sample
    try:
        one, two = count_kept_bytes(model, (each, 2 * each), tokens, dtype)
    except Exception as error:  # layers of transformers may ask for values, which meta tensors lack, and raise anything
        return memory, f"its layers ask for values ({type(error).__name__})"
    fixed, slope = fit_line((1, float(one)), (2, float(two)))
    return replace(memory, fixed=fixed, per_sample=slope), ""


def count_kept_bytes(model: nn.Module, sizes: tuple[int, ...], tokens: int, dtype: torch.dtype | None) -> list[int]:
    """Bytes that forward saves for backward, beside parameters, buffers and inputs, for so many rows each.

    Rows count as packed ones, whose attention has a mask. It counts as torch's fused kernel for CPUs keeps it (inputs,
    output and log-sum), as those for GPUs do. Under autocast the copies of frozen weights count: their layers keep them
    for the gradient of their inputs. The model is a `hugging_face.Logits` on the meta device, and is used up.

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
    return int(tensor.untyped_storage()._cdata)
