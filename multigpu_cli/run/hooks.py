"""Calls the hooks of --hook in their order, and sees to it that they change nothing."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, enable_grad

from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.optimizers.build import base_rate
from multigpu_cli.run.hook_numbers import HookNumbers
from multigpu_cli.run.hook_state import copy_state
from multigpu_cli.run.load_hooks import HookClass
from multigpu_cli.run.step_result import StepResult
from multigpu_cli.runtime.collectives import broadcast_object
from multigpu_cli.runtime.own_code_error import name_own_code
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks
from multigpu_cli.runtime.tensor_versions import TensorVersions
from multigpu_cli.runtime.world import World

if TYPE_CHECKING:
    from multigpu_cli.run.run import Run


@dataclass
class _Hook:
    """A hook with this rank's object, None where it wants none."""

    kind: HookClass
    object: Any
    warned: bool = False


@dataclass
class Hooks:
    """The hooks of a run; without any, each of its methods does nothing.

    All ranks know all classes. Which rank is called, and when, follows from them alone.
    """

    world: World
    all: Sequence[_Hook] = ()
    restored: Mapping[str, Any] = field(default_factory=dict)  # states of the checkpoint, by name
    _run: "Run" = field(init=False)
    _in_flight: int | None = None  # step of the checkpoint that is being written, on rank 0
    _written: int = -1  # step of the last one that is on disk, as far as this rank knows

    def __bool__(self) -> bool:
        return bool(self.all)

    def attach(self, run: "Run") -> None:
        """Follow this run."""
        self._run = run

    # -- what a run calls, in this order

    def start(self) -> None:
        """The first step of this attempt is next."""
        self._call("start")

    def after_backward(self, step: int) -> None:
        """The gradient of step `step`, counted from 0, is that of the global batch; the optimizer is next."""
        if any(hook.kind.is_due("after_backward", step + 1) for hook in self.all):
            scale = float(self._run.state.precision.state_dict().get("scale", 1.0))
            self._call("after_backward", gradients=True, step=step + 1, loss_scale=scale)

    def step_end(self, step: int, outcome: StepResult) -> None:
        """Step `step`, counted from 0, is done; where a hook asks for it, its loss is reduced and the host waits."""
        if any(hook.kind.is_due("step_end", step + 1) for hook in self.all):
            self._run.observer.loss.all_reduce_pending()
            norm, skipped = float(outcome.grad_norm), bool(outcome.skipped)
            loss = self._run.observer.loss.last
            self._call("step_end", step=step + 1, loss=loss, grad_norm=norm, skipped=skipped)

    def report_evaluation(self, split: str, metrics: Mapping[str, float]) -> None:
        """An evaluation of a split is done."""
        named = {f"{split}_{name}": value for name, value in metrics.items()}
        self._call("evaluated", split=split, metrics=MappingProxyType(named))

    def epoch_end(self) -> None:
        """An epoch is done, with its evaluation."""
        self._call("epoch_end")

    def begin_save(self, step: int) -> None:
        """Rank 0 begins to write the checkpoint of this step."""
        self._in_flight = step

    def finish_save(self) -> None:
        """Rank 0 knows that the checkpoint that it began last is on disk."""
        if self._in_flight is not None:
            self._written, self._in_flight = self._in_flight, None
            self._call_saved()

    def share_saved(self) -> None:
        """Tell the other ranks, if a hook there asks; all ranks call it together."""
        asked = any("saved" in hook.kind.methods and hook.kind.ranks != (0,) for hook in self.all)
        if not asked or self.world.size == 1:
            return
        written, before = int(broadcast_object(self.world, self._written)), self._written
        self._written = written
        if written != before:
            self._call_saved()

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run has ended, in whichever way; its summary is written. A hook's error does not hide that of the run."""
        if summary["status"] != "failed":
            self._call("end", status=summary["status"])
            return
        try:
            self._call("failed", status="failed", error=str(summary.get("error", "")))
        except TrainingError as error:  # the run's own error is on its way
            self._warn(error.problem)

    # -- what checkpoints hold

    def collect_state(self) -> dict[str, Any]:
        """Of each hook with a state that of its lowest rank, by name; all ranks call it together.

        What has no rank among these workers keeps the state that it had.

        Raises:
            TrainingError: state_dict failed, or returned what a checkpoint can't hold.
        """
        states: dict[str, Any] = {}
        for hook in self.all:
            source = hook.kind.first_rank(self.world)
            if not hook.kind.has_state:
                continue
            if source is None:
                states |= {name: state for name, state in self.restored.items() if name == hook.kind.name}
                continue
            own = None
            if self.world.rank == source:
                with name_own_code(f"--hook {hook.kind.code}: state_dict"):
                    found = hook.object.state_dict()
                own = copy_state(found, f"--hook {hook.kind.code}: state_dict returned")
            states[hook.kind.name] = broadcast_object(self.world, own, source=source) if source else own
        return states

    # -- calls

    def _call_saved(self) -> None:
        folder = self._run.folder / "checkpoints" / f"step_{self._written:08d}"
        self._call("saved", checkpoint=str(folder))

    def _call(self, method: str, *, gradients: bool = False, **more: Any) -> None:
        """Call this rank's hooks that have the method, and are due."""
        hooks = [hook for hook in self.all if hook.object is not None and method in hook.kind.methods]
        if not hooks:
            return
        numbers = self._read_numbers(more)
        weights, moved = self._name_tensors(), self._name_tensors(gradients=True) if gradients else {}
        tensors = (MappingProxyType(moved if gradients else weights),)
        for hook in hooks:
            if method not in ("after_backward", "step_end"):
                self._call_one(hook, method, numbers, (), {"weight": weights})
            elif hook.kind.is_due(method, numbers.step):
                self._call_one(hook, method, numbers, tensors, {"weight": weights, "gradient": moved})

    def _call_one(
        self, hook: _Hook, method: str, numbers: HookNumbers, tensors: tuple[Any, ...], watched: dict[str, Any]
    ) -> None:
        """Call one method of one hook.

        Raises:
            TrainingError: it failed, or changed a tensor in place.
        """
        call, watchdog = f"--hook {hook.kind.code}: {method}", self._run.observer.watchdog
        versions = TensorVersions(watched)
        watchdog.mark_progress()
        began = time.perf_counter()
        with name_own_code(call), enable_grad():  # ends with the mode that was there before
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
        if taken > hook.kind.budget_ms and not hook.warned:
            hook.warned = True
            self._warn(
                f"{call} took {taken:.1f} ms at step {numbers.step}, of a budget of {hook.kind.budget_ms:g} ms "
                "(its budget_ms): training waits for it. This is said once."
            )

    def _read_numbers(self, more: Mapping[str, Any]) -> HookNumbers:
        run = self._run
        step, batches = more.get("step", run.progress.step), run.plan.batches
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

    def _name_tensors(self, *, gradients: bool = False) -> dict[str, Tensor]:
        """What this process's optimizer moves, or its gradients, by the names of the parameters."""
        run = self._run
        names: dict[Tensor, str] = {parameter: name for name, parameter in run.state.model.named_parameters()}
        pairs = ((names[run.strategy.find_parameter(moved)], moved) for moved in run.trainable_parameters)
        if gradients:
            return {name: moved.grad for name, moved in pairs if moved.grad is not None}
        return {name: moved.detach() for name, moved in pairs}

    def _warn(self, text: str) -> None:
        warn: Callable[[str], object] = self._run.log.console.warn if self.world.is_main else warnings.warn
        warn(text)


def build_hooks(kinds: Sequence[HookClass], world: World, states: Mapping[str, Any]) -> Hooks:
    """Make the hooks of this rank, with their states; all ranks call it together.

    Args:
        states: of a checkpoint, by name; each rank of a hook loads the same.

    Raises:
        RequestError: a constructor or load_state_dict failed; the same on every rank.
    """
    return Hooks(world, run_on_all_ranks(world, lambda: [_build(kind, world, states) for kind in kinds]), states)


def _build(kind: HookClass, world: World, states: Mapping[str, Any]) -> _Hook:
    if not kind.is_on(world):
        return _Hook(kind, None)
    made = kind.make()
    if kind.has_state and kind.name in states:
        try:
            with name_own_code(f"--hook {kind.code}: load_state_dict, with its state of the checkpoint,"):
                made.load_state_dict(copy_state(states[kind.name], ""))
        except TrainingError as error:
            remedy = f"another name for its new form: --hook NAME={kind.code}"
            raise RequestError(error.problem, remedy=remedy) from error
    return _Hook(kind, made)
