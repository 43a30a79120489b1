"""Checks and calls the hooks of --hook in their order, keeps their state, and sees to it that they change nothing."""

import inspect
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from torch import Tensor, enable_grad

from multigpu_cli.config.code_names import NamedCode, parse_hook
from multigpu_cli.config.types import integer, number, quote_value
from multigpu_cli.distributed.world import World, broadcast_object, run_on_all_ranks
from multigpu_cli.errors import RequestError, TrainingError, pluralize
from multigpu_cli.optimizers.build import base_rate
from multigpu_cli.run.assembly.components import StepResult, TrainComponents
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.run.run import Run
from multigpu_cli.runtime.factories import bind_call, call_factory, find_factory, name_own_code
from multigpu_cli.runtime.module_state import TensorVersions

TENSORS = ("after_backward", "step_end")  # methods that also get named tensors
METHODS = ("start", *TENSORS, "evaluated", "epoch_end", "saved", "end", "failed")
_STATE = ("state_dict", "load_state_dict")
_LIKE = 0.8  # of a known name, above which another one is taken for a misspelling of it
_BUDGET_MS = 100.0


@dataclass
class Hook:
    """A class of --hook that was checked, and this rank's object."""

    name: str  # of its arguments and its state
    code: str
    factory: type  # the class
    args: dict[str, Any]  # of its constructor
    methods: tuple[str, ...]  # those of METHODS that it has
    ranks: tuple[int, ...] | None  # where it wants to be; None: everywhere
    every: int  # after_backward and step_end are called in each `every`-th step
    budget_ms: float  # milliseconds of a call beyond which there is a warning
    has_state: bool  # it has state_dict and load_state_dict
    object: Any = None  # None before it is made, and where this rank wants none
    warned: bool = False  # of its budget

    def describe(self, world_size: int) -> str:
        """What the plan says of it."""
        where = "on all ranks" if self.ranks is None else f"on rank {', '.join(map(str, self.ranks))}"
        where += ", which is not there" if self.ranks and min(self.ranks) >= world_size else ""
        steps = f"; each {self.every} steps" if self.every > 1 and set(TENSORS) & set(self.methods) else ""
        return f"{self.code}, {where}: {', '.join(self.methods)}{steps}"

    def first_rank(self, world: World) -> int | None:
        """The lowest rank that has one, whose state checkpoints hold; None if none has."""
        there = range(world.size) if self.ranks is None else [rank for rank in self.ranks if rank < world.size]
        return min(there, default=None)

    def is_due(self, method: str, step: int) -> bool:
        """Whether a method is called in this step, counted from 1."""
        return method in self.methods and (method not in TENSORS or step % self.every == 0)


def load_hook(entry: NamedCode, args: dict[str, Any]) -> Hook:
    """The class that an entry names; a RequestError where it is not there, or is no hook."""
    flag, found = f"--hook {entry.code}", find_factory(entry.code, {}, flag="--hook")
    if not inspect.isclass(found):
        raise RequestError(f"{flag}: it is a {type(found).__name__}, not a class", remedy="name a class")
    methods = tuple(name for name in METHODS if callable(getattr(found, name, None)))
    _refuse_misspelt(found, flag, methods)
    for name in methods:
        _check_signature(found, name, flag)
    state = [name for name in _STATE if callable(getattr(found, name, None))]
    if len(state) == 1:
        other = next(name for name in _STATE if name not in state)
        raise RequestError(f"{flag}: it has {state[0]}, and no {other}", remedy="both of them, or neither")
    return Hook(
        name=entry.name,
        code=entry.code,
        factory=found,
        args=args,
        methods=methods,
        ranks=_parse_ranks(getattr(found, "ranks", 0), flag),
        every=integer(1).read(getattr(found, "every", 1), f"{flag}: its every"),
        budget_ms=number(0, above=True).read(getattr(found, "budget_ms", _BUDGET_MS), f"{flag}: its budget_ms"),
        has_state=bool(state),
    )


def _refuse_misspelt(found: type, flag: str, methods: Collection[str]) -> None:
    """Refuse a method that is called almost like one of a hook, and a class that has none of these."""
    own = [name for name in dir(found) if not name.startswith("_") and callable(getattr(found, name))]
    for name in own:
        near = get_close_matches(name, (*METHODS, *_STATE), n=1, cutoff=_LIKE)
        if near and near[0] != name:
            problem = f"{flag}: it has a method {name!r}, which is never called"
            raise RequestError(problem, remedy=f"did you mean {near[0]!r}? (Or _{name}, if it is meant.)")
    if not methods:
        has = f"; it has {', '.join(own[:8])}" if own else ""
        raise RequestError(f"{flag}: it has none of the methods of a hook{has}", remedy=f"one of: {', '.join(METHODS)}")


def _check_signature(found: type, name: str, flag: str) -> None:
    given = ("numbers", "tensors") if name in TENSORS else ("numbers",)
    if inspect.iscoroutinefunction(getattr(found, name)) or inspect.isgeneratorfunction(getattr(found, name)):
        problem = f"{flag}: calling {name} would not run its body"
        raise RequestError(problem, remedy="a plain method, without async and yield")
    bound = isinstance(inspect.getattr_static(found, name), staticmethod | classmethod)
    problem = f"{flag}: {name} does not take {pluralize(len(given), 'argument')}"
    remedy = f"def {name}(self, {', '.join(given)})"
    bind_call(getattr(found, name), len(given) + (not bound), {}, problem=problem, remedy=remedy)


def _parse_ranks(wanted: Any, flag: str) -> tuple[int, ...] | None:
    if isinstance(wanted, str) and wanted == "all":
        return None
    ranks = (wanted,) if isinstance(wanted, int) else tuple(wanted) if isinstance(wanted, tuple | list | range) else ()
    if not ranks or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks):
        raise RequestError(f"{flag}: its ranks are {quote_value(wanted)}", remedy="ranks = 'all', 0, or (0, 1)")
    return tuple(sorted(set(ranks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HookNumbers:
    """Where a run stands, as plain values that nobody can change."""

    rank: int  # of this process
    world_size: int  # processes of the run
    folder: str  # the run folder
    step: int  # optimizer steps done, with the one in progress in after_backward; counted over the whole run
    total_steps: int  # of the run
    epoch: int  # that of the step, counted from 1
    samples: int  # trained on so far, over all workers
    learning_rate: float  # of the step
    loss: float | None = None  # mean over the global batch of the step; in step_end alone
    grad_norm: float | None = None  # of the global batch's gradient, before it is clipped; in step_end alone
    skipped: bool = False  # the optimizer skipped the step, since the gradient was not finite; in step_end alone
    loss_scale: float = 1.0  # what gradients are multiplied by in after_backward: 1, but with fp16
    split: str = ""  # val or test, in evaluated
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Of that evaluation as val_NAME or test_NAME; elsewhere those of the newest evaluations and train_loss."""

    checkpoint: str = ""  # its folder, in saved
    status: str = ""  # completed or stopped, in end; failed, in failed
    error: str = ""  # why the run failed, in failed


class UserHooks(Part):
    """The hooks of a run; all ranks know all classes. Which rank is called, and when, follows from them alone."""

    _left: dict[str, Any]  # states of the checkpoint, by name, of hooks that may have no rank among these workers
    _written = -1  # step of the last checkpoint that is on disk, as far as this rank has told its hooks

    def __init__(self, spec: RunSpec, world: World) -> None:
        entries, args = [parse_hook(text) for text in spec.config.hook.names], spec.config.hook.args
        self._hooks = run_on_all_ranks(world, lambda: [load_hook(each, args.get(each.name, {})) for each in entries])
        self._world = world
        processes = max(world.size, spec.placement.num_processes_to_launch)
        self._processes = 1 if spec.placement.strategy == "dp" else processes

    def plan_notes(self) -> dict[str, str | list[str]]:
        return {"hooks": [each.describe(self._processes) for each in self._hooks]}

    def fitted(self, components: TrainComponents) -> None:
        """Make the hooks of this rank, with their states; each rank of a hook loads the same."""
        states, world = components.state.part_states["hooks"], self._world
        self._left = {each.name: states.pop(each.name) for each in self._hooks if each.name in states}
        run_on_all_ranks(world, self._build)

    def _build(self) -> None:
        """Make this rank's objects."""
        for hook in self._hooks:
            if hook.ranks is not None and self._world.rank not in hook.ranks:
                continue
            hook.object = call_factory(hook.factory, {}, hook.args, where="hook")
            if hook.has_state and hook.name in self._left:
                try:
                    with name_own_code(f"--hook {hook.code}: load_state_dict, with its state of the checkpoint,"):
                        hook.object.load_state_dict(copy_state(self._left[hook.name], ""))
                except TrainingError as error:
                    remedy = f"another name for its new form: --hook NAME={hook.code}"
                    raise RequestError(error.problem, remedy=remedy) from error

    def start(self, run: Run, stack: ExitStack) -> None:
        self._call(run, "start")

    def after_backward(self, run: Run, step: int) -> None:
        if any(hook.is_due("after_backward", step + 1) for hook in self._hooks):
            scale = float(run.state.precision.state_dict().get("scale", 1.0))
            self._call(run, "after_backward", step=step + 1, loss_scale=scale)

    def step_end(self, run: Run, step: int, outcome: StepResult) -> None:
        """Where a hook asks for it, the step's loss is reduced and the host waits."""
        if any(hook.is_due("step_end", step + 1) for hook in self._hooks):
            run.observer.loss.all_reduce_pending()
            norm, skipped = float(outcome.grad_norm), bool(outcome.skipped)
            self._call(run, "step_end", step=step + 1, loss=run.observer.loss.last, grad_norm=norm, skipped=skipped)

    def evaluated(self, run: Run, split: str, metrics: Mapping[str, float]) -> None:
        named = {f"{split}_{name}": value for name, value in metrics.items()}
        self._call(run, "evaluated", split=split, metrics=MappingProxyType(named))

    def epoch_end(self, run: Run) -> None:
        with run.observer.timer.pause():
            self._call(run, "epoch_end")

    def written(self, run: Run) -> None:
        self._call_saved(run, run.checkpointer.written)

    def saved(self, run: Run) -> None:
        """Tell the other ranks, if a hook asks."""
        self._call_saved(run, run.checkpointer.written)
        if any("saved" in hook.methods for hook in self._hooks):
            self._call_saved(run, int(broadcast_object(run.world, self._written)))

    def end(self, run: Run, summary: Mapping[str, Any]) -> None:
        """A hook's error does not hide that of the run."""
        if summary["status"] != "failed":
            self._call(run, "end", status=summary["status"])
            return
        try:
            self._call(run, "failed", status="failed", error=str(summary.get("error", "")))
        except TrainingError as error:  # the run's own error is on its way
            _warn(run, error.problem)

    def state_dict(self, run: Run) -> dict[str, Any]:
        """Of each hook with a state that of its lowest rank, by name.

        What has no rank among these workers keeps the state that it had. TrainingError: state_dict failed, or returned
        what a checkpoint can't hold.
        """
        states: dict[str, Any] = {}
        for hook in self._hooks:
            source, name = hook.first_rank(run.world), hook.name
            if hook.has_state and source is None:
                states |= {name: self._left[name]} if name in self._left else {}
            elif hook.has_state:
                own = None
                if run.world.rank == source:
                    with name_own_code(f"--hook {hook.code}: state_dict"):
                        found = hook.object.state_dict()
                    own = copy_state(found, f"--hook {hook.code}: state_dict returned")
                states[name] = broadcast_object(run.world, own, source=source) if source else own
        return {"hooks": states}

    def _call_saved(self, run: Run, step: int) -> None:
        if step > self._written:
            self._written = step
            self._call(run, "saved", checkpoint=str(run.folder / "checkpoints" / f"step_{step:08d}"))

    def _call(self, run: Run, method: str, **more: Any) -> None:
        """Call this rank's hooks that have the method, and are due."""
        step = more.get("step", run.progress.step)
        hooks = [hook for hook in self._hooks if hook.object is not None and hook.is_due(method, step)]
        if not hooks:
            return
        numbers, weights = _read_numbers(run, step, more), _name_tensors(run)
        gradients = _name_tensors(run, gradients=True) if method == "after_backward" else {}
        shown = {"after_backward": gradients, "step_end": weights}
        tensors = (MappingProxyType(shown[method]),) if method in shown else ()
        for hook in hooks:
            _call_one(run, hook, method, numbers, tensors, {"weight": weights, "gradient": gradients})


def _call_one(
    run: Run, hook: Hook, method: str, numbers: HookNumbers, tensors: tuple[Any, ...], watched: dict[str, Any]
) -> None:
    """Call one method of one hook, which must neither fail nor change a tensor in place."""
    call, watchdog = f"--hook {hook.code}: {method}", run.observer.watchdog
    versions = TensorVersions(watched)
    watchdog.mark_progress()
    began = time.perf_counter()
    with name_own_code(call), enable_grad():  # afterwards the mode is as before
        getattr(hook.object, method)(numbers, *tensors)
    taken = 1e3 * (time.perf_counter() - began)
    watchdog.mark_progress()
    if changed := versions.find_changed():
        what, _, name = changed.partition(".")
        raise TrainingError(
            f"{call} changed the {what} of {name} at step {numbers.step}, and a hook must change nothing: the run "
            "would depend on which ranks it is on",
            remedy="clone() the tensor first; to change gradients or weights, an optimizer or task of your own",
        )
    if taken > hook.budget_ms and not hook.warned:
        hook.warned = True
        text = f"{call} took {taken:.1f} ms at step {numbers.step}, of a budget of {hook.budget_ms:g} ms "
        _warn(run, text + "(its budget_ms): training waits for it. This is said once.")


def _read_numbers(run: Run, step: int, more: Mapping[str, Any]) -> HookNumbers:
    batches = run.plan.batches
    facts: dict[str, Any] = {
        "rank": run.world.rank,
        "world_size": run.world.size,
        "folder": str(run.folder),
        "step": step,
        "total_steps": run.plan.schedule.total_steps,
        "epoch": -(-step // batches.steps_per_epoch),
        "samples": run.loaders.train.samples_seen_at(step, batches),
        "learning_rate": base_rate(run.state.optimizer),
        "metrics": MappingProxyType(dict(run.progress.last)),
    }
    return HookNumbers(**facts | dict(more))


def _name_tensors(run: Run, *, gradients: bool = False) -> dict[str, Tensor]:
    """What this process's optimizer moves, or its gradients, by the names of the parameters."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in run.state.model.named_parameters()}
    pairs = ((names[run.strategy.find_parameter(moved)], moved) for moved in run.strategy.local_parameters)
    if gradients:
        return {name: moved.grad for name, moved in pairs if moved.grad is not None}
    return {name: moved.detach() for name, moved in pairs}


def _warn(run: Run, text: str) -> None:
    warn: Callable[[str], object] = run.log.console.warn if run.world.is_main else warnings.warn
    warn(text)


def copy_state(value: Any, what: str) -> Any:
    """A copy in host memory, in the types that load without running code.

    NumPy's numbers become Python's, and subclasses of plain types the plain ones. `what` returned it, for the message.
    TrainingError: something in it is neither a plain value nor a tensor.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):  # or a subclass, such as NumPy's float64
        return next(plain(value) for plain in (int, float, str) if isinstance(value, plain))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {copy_state(name, what): copy_state(entry, what) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(copy_state(entry, what) for entry in value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    problem = f"{what} a {type(value).__module__}.{type(value).__name__}, which a checkpoint can't hold"
    remedy = "numbers, texts and tensors, in dicts, lists and tuples (an array: torch.tensor(array))"
    raise TrainingError(problem, remedy=remedy)
