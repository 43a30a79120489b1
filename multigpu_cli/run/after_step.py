"""Calls the methods `after_step` of model and task, with the outputs of forward for the global batch."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.world import World, all_gather_object
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.run.guard.unsaved import UnsavedState
from multigpu_cli.runtime.module_state import map_tensors
from multigpu_cli.runtime.seeding import seed_after_step
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.tasks.base import Task


class _Method(NamedTuple):
    """A method `after_step`, with its arguments before the number of the step."""

    call: Callable[..., None]
    subject: tuple[nn.Module, ...]  # the model for the task's method, nothing for the model's own
    takes_outputs: bool


class AfterStep:
    """The methods `after_step` of a run's model and task, and this worker's outputs of the current step.

    Outputs are recorded and gathered only if a method has a parameter `outputs`.
    """

    def __init__(self, task: Task, methods: Sequence[_Method], unsaved: UnsavedState, world: World) -> None:
        self._task, self._methods, self._unsaved, self._world = task, methods, unsaved, world
        self._takes_outputs = any(method.takes_outputs for method in methods)
        self._outputs: dict[int, Any] = {}  # outputs of this worker's micro-batches, by their number in the step

    def begin_step(self) -> None:
        """Discard what a trial of a batch, or a step that was not finished, has recorded."""
        self._outputs.clear()

    def loss_sum(self, model: Any, batch: Batch) -> Tensor:  # Any: a module that a strategy calls
        """Return the task's `loss_sum` of a micro-batch, and record what the model returned for it."""
        if not self._takes_outputs:
            return self._task.loss_sum(model, batch)
        returned: list[Any] = []
        handle = model.register_forward_hook(lambda module, inputs, outputs: returned.append(outputs))
        try:
            loss = self._task.loss_sum(model, batch)
        finally:
            handle.remove()
        if len(returned) != 1:
            problem = f"after_step takes outputs, but the task calls the model {len(returned)} times in a micro-batch"
            raise RequestError(problem, remedy="call it once, with all inputs; or leave out the parameter outputs")
        self._outputs[batch.micro_batch_index] = _copy(self._task.step_outputs(returned[0]), "outputs")
        return loss

    @torch.no_grad()
    def call(self, step: int, skipped: Tensor, seed: int, devices: Sequence[torch.device]) -> None:
        """Call the methods after optimizer step `step`, counted from 1, unless it was skipped: `skipped` () is 1.

        All ranks call it together. TrainingError: a method replaces parameters, or changes what no checkpoint contains.
        """
        if skipped:  # on a GPU the host waits here
            return
        outputs = self._gather_outputs() if self._takes_outputs else None
        seed_after_step(seed, step, *devices)
        with self._unsaved.watch():
            for method in self._methods:
                method.call(*method.subject, step, **({"outputs": outputs} if method.takes_outputs else {}))

    def _gather_outputs(self) -> Any:
        """Return the outputs of all workers in the order of micro-batches, joined along dimension 0."""
        by_number: dict[int, Any] = {}
        for outputs in all_gather_object(self._world, self._outputs):
            by_number |= outputs
        self._outputs = {}
        joined = _join([by_number[number] for number in sorted(by_number)], "outputs")
        return map_tensors(joined, lambda _, tensor: tensor.to(self._world.device))


def find_after_step(task: Task, model: nn.Module, strategy: Strategy, world: World, *, guard: bool) -> AfterStep | None:
    """Return the methods of task and model, or None; with `guard` the first call finds the attributes they change.

    RequestError: a method has other parameters, only a layer has one, or the strategy divides the weights.
    """
    methods = list(_find_methods(task, model))
    if not methods:
        layers = [name for name, layer in model.named_modules() if callable(getattr(layer, "after_step", None))]
        if layers:
            problem = f"after_step of the layer {layers[0]} is not called: neither the model nor the task has one"
            raise RequestError(problem, remedy="call it in a method after_step of the model, or rename it")
        return None
    if strategy.sharded:
        problem = f"--multi-gpu {strategy.name} gives after_step of model or task only a shard of each weight"
        raise RequestError(problem, remedy="use --multi-gpu ddp")
    saves_itself = type(task).after_step is Task.after_step or type(task).state is not Task.state
    unsaved = UnsavedState(model, {} if saves_itself else {"task": task}, guard=guard)
    return AfterStep(task, methods, unsaved, world)


def _find_methods(task: Task, model: nn.Module) -> Iterator[_Method]:
    """Yield the model's own method, then the task's."""
    if callable(own := getattr(model, "after_step", None)):
        yield _Method(own, (), _takes_outputs(own, "model", "step"))
    if type(task).after_step is not Task.after_step:
        yield _Method(task.after_step, (model,), _takes_outputs(task.after_step, "task", "model", "step"))


def _takes_outputs(method: Callable[..., None], owner: str, *given: str) -> bool:
    """Return whether a method has a parameter `outputs`; RequestError if it does not take what it is called with."""
    signature = inspect.signature(method)
    takes_outputs = "outputs" in signature.parameters
    try:
        signature.bind(*given, **({"outputs": None} if takes_outputs else {}))
    except TypeError as error:
        problem = f"after_step of the {owner} ({type(getattr(method, '__self__', method)).__name__}): {error}"
        names = ", ".join(("self", *given))
        raise RequestError(problem, remedy=f"def after_step({names}), or def after_step({names}, outputs)") from error
    return takes_outputs


def _copy(value: Any, name: str) -> Any:
    """Return a micro-batch's outputs as tuples and dicts of copies: buffers among them change with the next pass."""
    if isinstance(value, Tensor):
        return value.detach().clone().reshape(value.shape or (1,))
    if isinstance(value, Mapping):
        return {key: _copy(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_copy(entry, f"{name}[{index}]") for index, entry in enumerate(value))
    problem = f"after_step takes outputs, but {name} of the model is a {type(value).__name__}"
    raise RequestError(problem, remedy="return tensors, or tuples and dicts of tensors; or leave out the parameter")


def _join(parts: Sequence[Any], name: str) -> Any:
    """Join the outputs of all micro-batches; TrainingError if they differ in more than their number of rows."""
    first = parts[0]
    if isinstance(first, dict) and all(isinstance(part, dict) and part.keys() == first.keys() for part in parts):
        return {key: _join([part[key] for part in parts], f"{name}[{key!r}]") for key in first}
    if isinstance(first, tuple) and all(isinstance(part, tuple) and len(part) == len(first) for part in parts):
        return tuple(_join(column, f"{name}[{index}]") for index, column in enumerate(zip(*parts, strict=True)))
    forms = {(part.dtype, part.shape[1:]) if isinstance(part, Tensor) else type(part) for part in parts}
    if len(forms) == 1:
        return torch.cat(list(parts))
    problem = f"after_step: {name} differs in shape, dtype or type between micro-batches, except in its number of rows"
    raise TrainingError(problem, remedy="return tensors whose dimensions after the first are always the same")
