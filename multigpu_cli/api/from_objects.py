"""The caller's own model, data, loss and optimizer, in place of what the settings name."""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from multigpu_cli.checkpoint.snapshot import TrainState
from multigpu_cli.checkpoint.weights import check_fit, read_weights
from multigpu_cli.config.schema import Config
from multigpu_cli.data.load import FROM_MODEL
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World, run_on_main_rank
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.models.build import adapt_model, is_of_transformers, prepare_model
from multigpu_cli.optimizers.build import StateLoader, describe_step
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.planning.plan import Plan
from multigpu_cli.planning.schedule import Rate
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.runtime.model_call import unbind_call
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.tasks.base import Loss, Task
from multigpu_cli.tasks.own_loss import Criterion


@dataclass(kw_only=True)
class FromObjects(FromConfig):
    """The objects of a run from Python; the model is trained in place. What is None is built from the settings."""

    source: DataSource
    model: nn.Module  # on any device; all ranks start from rank 0's weights
    criterion: Loss | None = None  # outputs and targets → loss; None: the task that the settings or the dataset name
    optimizer: torch.optim.Optimizer | None = None  # without a scheduler of it, its rates stay constant
    scheduler_interval: str | None = None  # when it steps: "epoch" or "step"; None: as what it was made for tells
    whole_because: str = field(default="it is the caller's own", init=False)

    def __post_init__(self) -> None:
        objects = (self.model, self.criterion, self.optimizer, self.scheduler)
        names = ", ".join(getattr(each, "__name__", type(each).__name__) for each in objects if each is not None)
        self.comment = f"# with live objects from Python, which --config does not bring back: {names}\n"
        self.named = () if self.criterion else ("task",)
        self._end = _find_length(self.scheduler, ()) if self.scheduler else None

    def list_unused(self, config: Config) -> set[str]:
        of_optimizer = {"optimizer.rates", "optimizer.layer_decay", "optimizer.groups"}
        return {"mode", "data_dir"} | (of_optimizer if self.optimizer else set())

    def find_unread(self, config: Config, task: str) -> Iterator[RequestError]:
        if not self.criterion:
            yield from super().find_unread(config, task)
            return
        given = {"label_smoothing": config.task.label_smoothing, "task.class_weights": config.task.class_weights}
        for key in filter(given.get, given):
            remedy = "criterion=nn.CrossEntropyLoss(weight=…, label_smoothing=…), say"
            yield RequestError(f"{key} does not reach the criterion", remedy=remedy)

    def build_task(self, config: Config, source: DataSource) -> Task:
        if not self.criterion:
            return super().build_task(config, source)
        return Criterion(source, config.task, self.criterion, has_logits=is_of_transformers(self.model))

    def build_model(self, config: Config, source: DataSource, *, reference: bool = False) -> nn.Module:
        return prepare_model(self.adapt_model(config), config.model, config.model.name or source.model)

    def adapt_model(self, config: Config) -> nn.Module:
        """The model, as tasks call it; a criterion may want the whole output of one of transformers."""
        whole = self.criterion is not None or config.task.name == FROM_MODEL
        return adapt_model(self.model, whole_output=whole)

    def describe_model(self, config: Config, source: DataSource) -> str:
        return ""

    def suggest_outputs(self, config: Config, source: DataSource, given: int, wanted: int) -> str:
        return f"a last layer with {wanted} outputs, or another task"

    def build_optimizer(
        self, config: Config, plan: Plan, model: nn.Module, strategy: Strategy
    ) -> torch.optim.Optimizer:
        """The caller's optimizer over exactly the trainable parameters, with its state on the model's device."""
        if self.optimizer is None:
            return super().build_optimizer(config, plan, model, strategy)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            problem = "optimizer: LBFGS is not supported: it evaluates the loss several times per step"
            remedy = "another optimizer, or a training loop of your own around setup_multi_gpu_training(model)"
            raise RequestError(problem, remedy=remedy)
        moved = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in moved]
        strange = moved - {id(p) for p in model.parameters()}
        if left or strange:
            what = f"does not move {', '.join(left[:4])}" if left else f"moves {len(strange)} parameter(s) not its own"
            problem = f"optimizer: it {what}"
            remedy = "build it from this model's parameters(), and freeze others with requires_grad_(False)"
            raise RequestError(problem, remedy=remedy)
        StateLoader(self.optimizer)  # for this load, and for that of a checkpoint
        if self.optimizer.state:
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # moves it to the parameters' device
        return self.optimizer

    def measure_optimizer(self, config: Config, model: nn.Module) -> int:
        return 0 if self.optimizer else super().measure_optimizer(config, model)

    def describe_optimizer(self, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        if self.optimizer is None:
            return super().describe_optimizer(config, model, optimizer)
        return f"your {type(optimizer).__name__}, {describe_step(optimizer, config.optimizer)}"

    def may_draw(self, config: Config) -> bool:
        return self.optimizer is not None or super().may_draw(config)

    def explain_rate(self, config: Config, rate: Rate, batches: BatchPlan, epochs: int, steps: int) -> tuple[Rate, int]:
        if self.optimizer is None:
            return rate, 0
        words, every = f"{rate.value:.4g}, that of your {type(self.optimizer).__name__}", 0
        if self.scheduler:
            interval = self.scheduler_interval or "epoch"
            if self.scheduler_interval is None and config.batch.size != "auto":  # else once it is measured
                interval = choose_interval(self.scheduler, epochs, steps, batches)
            words += f", moved by {type(self.scheduler).__name__} after each {interval}"
            every = 1 if interval == "step" else batches.steps_per_epoch
        return rate._replace(reason=words), every

    def set_rate(self, state: TrainState, plan: Plan, step: int) -> None:
        """Step the scheduler up to its position before this optimizer step; without one the rates stay."""
        if self.optimizer is None:
            super().set_rate(state, plan, step)
        if self.scheduler is None:
            return
        with warnings.catch_warnings():
            # after a resume the optimizer has stepped, in the attempt before
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while state.progress.scheduled < step // plan.scheduler_every:
                if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                    self.scheduler.step(state.progress.last["val_loss"])
                else:
                    self.scheduler.step()
                state.progress.scheduled += 1

    def check_restored(self, plan: Plan) -> None:
        if self.scheduler and (end := _find_length(self.scheduler, ())) != self._end:
            raise RequestError(
                f"scheduler: this {type(self.scheduler).__name__} ends after {self._end} steps, and that of the "
                f"checkpoint, from which the run would resume, after {end}",
                remedy=f"make it for {end} steps; or init_from and another save_dir, for a schedule from the beginning",
            )
        if not isinstance(self.scheduler, OneCycleLR):
            return
        calls = (plan.schedule.total_steps - 1) // plan.scheduler_every
        if calls > self.scheduler.total_steps:
            raise RequestError(
                f"scheduler: OneCycleLR has {self.scheduler.total_steps} steps, and the run steps it {calls} times",
                remedy=f"OneCycleLR(total_steps={calls + 1}); a resumed run has its checkpoint's, and its length",
            )

    def adopt_weights(self, folder: str, world: World) -> None:
        model = adapt_model(self.model).to(world.device)
        best, last = (Path(folder, name) for name in ("best.pt", "last.pt"))
        state = run_on_main_rank(world, lambda: read_weights(last if last.is_file() and not best.is_file() else best))
        check_fit(model, state, folder)
        model.load_state_dict(state)
        unbind_call(self.model)


_ENDS = {
    OneCycleLR: "total_steps",
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.CosineAnnealingWarmRestarts: "T_0",
    lr_scheduler.PolynomialLR: "total_iters",
    lr_scheduler.LinearLR: "total_iters",
}
_ENDS_NOWHERE_ELSE = (OneCycleLR, LambdaLR)  # others may go on after their end, or be cut off before it
_UNDERFLOW = 1e-12  # an exponential reaches zero too, long after it has become as good as zero


def choose_interval(scheduler: LRScheduler, epochs: int, steps: int, batches: BatchPlan) -> str:
    """'step' or 'epoch', for a run of so many steps, which max_steps may cut; RequestError: made for other ones."""
    whole, each = epochs * batches.steps_per_epoch, batches.accumulation
    # the steps of one process by the length of its loader, with and without accumulation
    loader = batches.samples // batches.micro_batch
    loader += bool(batches.samples % batches.micro_batch and not batches.drop_last)
    alone = {epochs * loader, epochs * loader // each, epochs * (loader // each), epochs * -(-loader // each)}
    length = _find_length(scheduler, sorted({epochs, steps, whole} | alone))
    if length is None:  # without an end; CyclicLR, and the warm-ups of transformers, count optimizer steps
        lambdas = scheduler.lr_lambdas if isinstance(scheduler, LambdaLR) else []
        warms_up = any("num_warmup_steps" in getattr(each, "keywords", {}) for each in lambdas)
        return "step" if warms_up or isinstance(scheduler, lr_scheduler.CyclicLR) else "epoch"
    if length != epochs and length in (steps, whole):
        return "step"
    if length == epochs or not (length in alone or isinstance(scheduler, _ENDS_NOWHERE_ELSE)):
        return "epoch"
    raise RequestError(
        f"scheduler: {type(scheduler).__name__} is made for {pluralize(length, 'step')}, and the run has "
        f"{pluralize(steps, 'optimizer step')} of up to {pluralize(batches.global_batch, 'sample')} in "
        f"{pluralize(epochs, 'epoch')}",
        remedy=f"make it for {steps} steps (global_batch_size keeps their number on any number of workers), or for "
        f"{epochs}, to step it once an epoch; or scheduler_step='step' or 'epoch', to step it as it is",
    )


def _find_length(scheduler: LRScheduler, expected: Collection[int]) -> int | None:
    """Return the number of steps after which a scheduler ends; None if it has no visible end."""
    match scheduler:
        case lr_scheduler.SequentialLR():
            before = int(scheduler._milestones[-1])
            last = _find_length(scheduler._schedulers[-1], [number - before for number in expected])
            return None if last is None else before + last
        case lr_scheduler.ChainedScheduler():
            lengths = [_find_length(each, expected) for each in scheduler._schedulers]
            return next((length for length in lengths if length in expected), None)
        case LambdaLR():
            return next(filter(None, (_find_zero(factor, expected) for factor in scheduler.lr_lambdas)), None)
    return next((int(getattr(scheduler, name)) for kind, name in _ENDS.items() if isinstance(scheduler, kind)), None)


def _find_zero(factor: Callable[[int], float], expected: Collection[int]) -> int | None:
    """The step at which a factor becomes zero: at one that is expected (a cosine rises again), or from there on."""
    if named := getattr(factor, "keywords", {}).get("num_training_steps"):  # of transformers' schedules
        return int(named)
    try:
        factor = deepcopy(factor)  # an object may count its calls
        if found := next((step for step in expected if step > 0 and factor(step) <= 0 < factor(step - 1)), None):
            return found
        high = next((2**power for power in range(1, 40) if factor(2**power) <= 0), 0)
        end = bisect_left(range(high), True, lo=high // 2 + 1, key=lambda step: factor(step) <= 0)
        return end if high and factor(end - 1) > _UNDERFLOW else None
    except Exception:  # the user's own code may raise anything, such as at the end of a table: its end is unknown then
        return None
