"""Builds the network of a run on this rank's device, and tries the first batch with it."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from multigpu_cli.checkpoint.initial_weights import WeightMatch, load_initial_weights
from multigpu_cli.checkpoint.weights import broadcast_weights, check_extra_state
from multigpu_cli.data.collate import describe_shapes
from multigpu_cli.data.load import FROM_MODEL
from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.world import World, is_out_of_memory, run_on_all_ranks
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import use_channels_last
from multigpu_cli.optimizers.eval_weights import EMAModel, list_unsaved_parameters
from multigpu_cli.run.request.checks import check_state_fits
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.runtime.model_call import CallRecorder
from multigpu_cli.runtime.module_state import eval_mode, preserve_buffers
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.seeding import seed_weights
from multigpu_cli.tasks.base import Task


class BuiltModel(NamedTuple):
    """The network of this rank."""

    model: nn.Module
    call: str | None  # how it is called, in words; None as long as no batch was tried
    initial_weights: WeightMatch | None  # what --init-from loaded, on rank 0
    average: EMAModel | None  # its exponential moving average, with --ema
    blocks: Sequence[nn.Module] = ()  # what --compile compiles by itself; none for the whole
    source: int | None = 0  # the rank that has the weights, where only one has; None: a checkpoint has them
    origin: str = ""  # where they come from, for the plan, unless each rank has them


class ModelFactory(NamedTuple):
    """What a strategy builds a run's network from."""

    spec: RunSpec
    world: World
    task: Task
    first_batch: Callable[[], Batch]

    def build_whole(self) -> BuiltModel:
        """The network on each rank's device, after a first batch that fits it; all ranks call it together."""
        model, call, weights = run_on_all_ranks(self.world, self._build)
        if self.spec.factories.whole_because or self.spec.begins_from_weights:
            broadcast_weights(model, self.world)
        ema = self.spec.config.optimizer.ema
        average = None if ema == "off" else EMAModel(model, float(ema), list_unsaved_parameters(model))
        return BuiltModel(model, call, weights, average)

    def _build(self) -> tuple[nn.Module, str, WeightMatch | None]:
        spec, device = self.spec, self.world.device
        model = create_model(spec)
        weights = load_weights_to_send(spec, self.world, model)
        check_state_fits(spec, model, device)
        model.to(device).train()
        precision = Precision(spec.plan.precision, device)
        self.task.check_model(model, precision)
        call = try_first_batch(spec, self.task, model, precision, self.first_batch())
        check_extra_state(model, spec.model)
        return model, call, weights


def create_model(spec: RunSpec) -> nn.Module:
    return spec.factories.build_model(spec.config, spec.source, reference=spec.has_reference)


def load_weights_to_send(spec: RunSpec, world: World, model: nn.Module) -> WeightMatch | None:
    """--init-from, on the rank from which the others get the weights."""
    if not spec.begins_from_weights or not world.is_main:
        return None
    config = spec.config.model
    return load_initial_weights(model, Path(str(config.init_from)), partial=config.init_partial)


def try_first_batch(spec: RunSpec, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> str:
    """Evaluate the batch, and choose the memory format by it; returns how the model is called, in words.

    Channels last is taken if the model has 2-d convolutions and accepts the batch in it: a `.view` of features may not.
    RequestError: the model does not accept the batch in any format.
    """
    if any(map(is_lazy, model.parameters())):  # the first pass creates their weights: before it there is no format
        seed_weights(spec.config.reproducibility.seed, late=True)
        smoke_test_batch(spec, task, model, precision, batch)
    call = try_channels_last(spec, task, model, precision, batch)
    return smoke_test_batch(spec, task, model, precision, batch) if call is None else call


def try_channels_last(spec: RunSpec, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> str | None:
    """Lay the kernels of 2-d convolutions out with channels last, if the model accepts the batch in it.

    Returns how the model is called, in words; None where the layout is as it was.
    """
    if use_channels_last(model):
        try:
            return smoke_test_batch(spec, task, model, precision, batch)
        except RequestError:
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return None


def smoke_test_batch(
    spec: RunSpec,
    task: Task,
    model: nn.Module,
    precision: Precision,
    batch: Batch,
    *,
    training: bool = False,
    which: str = "first batch",
) -> str:
    """Evaluate a batch, or with `training` compute its loss: some models return something else in training.

    Returns how the model is called, in words; messages name the batch by `which`. RequestError: data, model and task do
    not fit together.
    """
    if isinstance(batch.inputs, list) and spec.placement.strategy == "dp":
        raise RequestError(
            "--multi-gpu dp would cut each part of a batch that is a list of samples", remedy="--multi-gpu ddp"
        )
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise RequestError(f"the embedding {name!r} has sparse=True: gradients are dense", remedy="sparse=False")
    mode, measure = (nullcontext(), task.loss_sum) if training else (eval_mode(model), task.measure)
    with CallRecorder(model) as seen:
        try:
            with preserve_buffers(model), mode, precision.autocast():
                measured = measure(model, batch)
            if isinstance(measured, Tensor) and not measured.requires_grad:
                raise ValueError("no parameter that learns is part of the loss")
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            if is_out_of_memory(error):
                raise
            raise _mismatch_error(spec, task, batch, seen, error, which) from error
    return seen.describe()


def _mismatch_error(
    spec: RunSpec, task: Task, batch: Batch, seen: CallRecorder, error: Exception, which: str
) -> RequestError:
    """What the model was called with, what it returned, and what the task expects."""
    source, config, outputs = spec.source, spec.config, seen.outputs
    line = traceback.extract_tb(error.__traceback__)[-1]
    message = (str(error).splitlines() or [""])[0]
    classes = source.num_classes or source.num_outputs
    built = spec.factories.describe_model(config, source)
    lines = [
        f"--model {spec.model} does not take the {which} of --data {config.data.name}, or --task {spec.task} "
        "not what it returns",
        f"  {type(error).__name__} in {Path(line.filename).name}:{line.lineno}: {message}",
        *([f"  {built}"] if built else []),
        f"  it was called with  {describe_shapes(batch.inputs)}",
        *([f"  that is             {seen.describe()}"] if seen.describe() else []),
        f"  it returned         {describe_shapes(outputs[0]) if outputs else 'nothing: it failed itself'}",
        f"  the targets are     {'none' if batch.targets is None else describe_shapes(batch.targets)}",
        f"  the task expects    {task.expected_shapes}",
    ]
    remedy = _suggest_model(spec, outputs, classes) if outputs else "a model for these inputs"
    return RequestError("\n".join(lines), remedy=remedy + ("; --debug shows the traceback" if built else ""))


def _suggest_model(spec: RunSpec, outputs: list[Any], wanted: int) -> str:
    """A remedy for these outputs; the last dimension of (n, classes) and (n, t, classes) is their number."""
    found = outputs[0]
    if isinstance(found, tuple | dict) and spec.task != FROM_MODEL:
        return "--task from-model, for a model that gets the targets too and returns its loss; or another --model"
    if not isinstance(found, Tensor) or found.ndim not in (2, 3) or found.shape[-1] == wanted:
        return "another --model, or --task"
    return spec.factories.suggest_outputs(spec.config, spec.source, found.shape[-1], wanted)
