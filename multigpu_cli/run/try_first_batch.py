"""A first evaluation of one small batch: whether data, model and task fit together, and in which memory format."""

import traceback
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from multigpu_cli.config.types import quote_value
from multigpu_cli.data.collate import describe_shapes
from multigpu_cli.data.loader import Batch
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import use_channels_last
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.runtime.out_of_memory import is_out_of_memory
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.runtime.preserve_module_state import eval_mode, preserve_buffers
from multigpu_cli.runtime.seeding import seed_weights
from multigpu_cli.tasks.base import Task


def try_first_batch(spec: RunSpec, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> None:
    """Evaluate the batch, and choose the memory format by it.

    Channels last is taken if the model has 2-d convolutions and accepts the batch in it: a `.view` of features may not.

    Raises:
        RequestError: the model does not accept the batch in any format.
    """
    if any(map(is_lazy, model.parameters())):  # the first pass creates their weights: before it there is no format
        seed_weights(spec.config.reproducibility.seed, late=True)
        _evaluate_batch(spec, task, model, precision, batch)
    if use_channels_last(model):
        try:
            return _evaluate_batch(spec, task, model, precision, batch)
        except RequestError:
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return _evaluate_batch(spec, task, model, precision, batch)


def _evaluate_batch(spec: RunSpec, task: Task, model: nn.Module, precision: Precision, batch: Batch) -> None:
    outputs: list[str] = []
    hook = model.register_forward_hook(lambda _module, _inputs, output: outputs.append(describe_shapes(output)))
    try:
        with preserve_buffers(model), eval_mode(model), precision.autocast():
            task.measure(model, batch)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        if is_out_of_memory(error):
            raise
        raise _mismatch_error(spec, task, batch, outputs, error) from error
    finally:
        hook.remove()


def _mismatch_error(spec: RunSpec, task: Task, batch: Batch, outputs: list[str], error: Exception) -> RequestError:
    """What the model was called with, what it returned, and what the task expects."""
    source, config = spec.source, spec.config
    line = traceback.extract_tb(error.__traceback__)[-1]
    message = (str(error).splitlines() or [""])[0]
    classes = source.num_classes or source.num_outputs
    args = "".join(f", {name}={quote_value(value)}" for name, value in config.model.args.items())
    built = f"  the model was built for input_shape={source.input_shape}, num_classes={classes}{args}"
    lines = [
        f"--model {spec.model} does not take the first batch of --data {config.data.name}, or --task {spec.task} "
        "not what it returns",
        f"  {type(error).__name__} in {Path(line.filename).name}:{line.lineno}: {message}",
        *([] if spec.user_objects else [built]),
        f"  it was called with  {describe_shapes(batch.inputs)}",
        f"  it returned         {outputs[0] if outputs else 'nothing: it failed itself'}",
        f"  the targets are     {describe_shapes(batch.targets)}",
        f"  the task expects    {task.expected_shapes}",
    ]
    remedy = "another --model, or --task" if outputs else "a model for these inputs"
    return RequestError(
        "\n".join(lines), remedy=remedy + ("" if spec.user_objects else "; --debug shows the traceback")
    )
