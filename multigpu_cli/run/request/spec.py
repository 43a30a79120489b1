"""A run as it was requested (RunRequest), how it builds what it consists of (FromConfig), and as planned (RunSpec)."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from multigpu_cli.capabilities import BEFORE_PINNED, RESOLVED, TASKS
from multigpu_cli.checkpoint.run_folder import ResumePoint
from multigpu_cli.checkpoint.snapshot import TrainState
from multigpu_cli.config.code_names import NAMING, match_names
from multigpu_cli.config.resume_rules import OF_THE_COMMAND, flatten_settings
from multigpu_cli.config.schema import LENGTH, Config, OptimizerConfig
from multigpu_cli.config.types import quote_value
from multigpu_cli.data.fingerprint import DataFingerprint
from multigpu_cli.data.load import FROM_MODEL, find_data_factory
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.models.blocks import measure_depths
from multigpu_cli.models.build import build_model, find_adapter, suggest_outputs
from multigpu_cli.monitor.gpu import NoNvml, open_nvml, read_driver
from multigpu_cli.optimizers.build import build_optimizer, construct_optimizer, describe_step, set_rate
from multigpu_cli.optimizers.eval_weights import is_schedule_free
from multigpu_cli.optimizers.trial import check_optimizer, measure_state_bytes
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.planning.plan import Plan
from multigpu_cli.planning.schedule import OPTIMIZERS, Rate, decay_by_depth
from multigpu_cli.runtime import factories
from multigpu_cli.runtime.arithmetic import compute_checksums
from multigpu_cli.runtime.seeding import seed_weights
from multigpu_cli.strategies.base import Strategy, find_strategy
from multigpu_cli.tasks.base import Task

_SMOOTHED = ("classification", "segmentation", "multi-label", "language-model", "dpo")


@dataclass(kw_only=True)
class FromConfig:
    """Builds what a run consists of from its settings; the Python API's has objects in the place of some."""

    source: DataSource | None = None  # the dataset, where it is there already
    scheduler: LRScheduler | None = None  # moves the optimizer's rates, in place of the schedule
    ddp: Mapping[str, Any] = field(default_factory=dict)  # further arguments of DistributedDataParallel
    whole_because: str = field(default="", init=False)  # why each rank builds the whole model, with its own weights
    named: tuple[str, ...] = field(default=NAMING, init=False)  # which of data, model and task settings name
    comment: str = field(default="", init=False)  # the first lines of config.yaml

    def list_unused(self, config: Config) -> set[str]:
        """Settings of data and optimizer that have no effect."""
        return {"mode", "data_dir"} - inspect.signature(find_data_factory(config)).parameters.keys()

    def find_unread(self, config: Config, task: str) -> Iterator[RequestError]:
        """Settings that the loss does not read."""
        if config.task.label_smoothing and task in TASKS and task not in _SMOOTHED:
            names = ", ".join(_SMOOTHED)
            yield RequestError(f"--label-smoothing is for --task {names}, not {task}", remedy="--label-smoothing 0")

    def build_task(self, config: Config, source: DataSource) -> Task:
        """The task that the user named, else the dataset's own, with its arguments."""
        name, offered = config.task.name or source.task, {"source": source, "config": config.task}
        factory = factories.find_factory(name, TASKS, flag="--task")
        task = factories.call_factory(factory, offered, config.task.args, where="task")
        if not isinstance(task, Task):
            raise RequestError(f"--task {name}: not a subclass of multigpu_cli.tasks.base.Task")
        return task

    def build_model(self, config: Config, source: DataSource, *, reference: bool = False) -> nn.Module:
        """The model with weights drawn from the seed, the dataset's own if none was named; see `has_reference`."""
        task = config.task.name or source.task
        offered = {
            "input_shape": source.input_shape,
            "num_classes": source.num_classes or source.num_outputs,
            "task": task,
            "mode": config.data.mode,
            "seed": config.reproducibility.seed,
        } | dict(source.model_kwargs)
        if config.model.dir is not None:
            offered["model_dir"] = config.model.dir
        seed_weights(config.reproducibility.seed)
        adapt = find_adapter(config, reference=reference)
        name = config.model.name or source.model
        return build_model(config.model, name, offered, whole_output=task == FROM_MODEL, adapt=adapt)

    def describe_model(self, config: Config, source: DataSource) -> str:
        """What the model was built for."""
        args = {"input_shape": source.input_shape, "num_classes": source.num_classes or source.num_outputs}
        words = [f"{name}={quote_value(value)}" for name, value in (args | config.model.args).items()]
        return f"the model was built for {', '.join(words)}"

    def suggest_outputs(self, config: Config, source: DataSource, given: int, wanted: int) -> str:
        """The remedy for a model with `given` outputs."""
        suggestion = suggest_outputs(config.model.name or source.model, config.model.args, given, wanted)
        return f"{suggestion}, or another --task"

    def build_optimizer(self, config: Config, plan: Plan, model: nn.Module, strategy: Strategy) -> Optimizer:
        """The optimizer over what the strategy has this process move, tried before anything is written."""
        settings, peak, exact = config.optimizer, plan.schedule.peak, config.reproducibility.exact
        factors = compute_rate_factors(model, settings)
        optimizer = build_optimizer(model, settings, factors, strategy.local_parameters, peak)
        if exact or settings.name not in OPTIMIZERS:
            construct = partial(construct_optimizer, settings, rate=peak)
            workers = 1 if plan.strategy == "dp" else plan.batches.workers  # dp steps in one place
            check_optimizer(optimizer, construct, settings.name, exact=exact, workers=workers)
        return optimizer

    def measure_optimizer(self, config: Config, model: nn.Module) -> int:
        """Bytes of the optimizer's state, as far as they are known."""
        return measure_state_bytes(model, config.optimizer)

    def describe_optimizer(self, config: Config, model: nn.Module, optimizer: Optimizer) -> str:
        """What the plan says of the optimizer: its name, weight decay and clipping, and what is particular to it."""
        name, more = config.optimizer.name, ""
        if name == "muon":
            hidden = {parameter for group in optimizer.param_groups if group["hidden"] for parameter in group["params"]}
            others = {name: p for name, p in model.named_parameters() if p.requires_grad and p not in hidden}
            matrices = ", ".join(name for name, parameter in others.items() if parameter.ndim == 2)
            rest = f"{pluralize(len(others), 'other tensor')} by AdamW{matrices and f', with the matrices {matrices}'}"
            more = f"; {pluralize(len(hidden), 'hidden weight')} by Muon, {rest}"
        elif is_schedule_free(optimizer):
            more = "; schedule-free: evaluated and saved for use in its eval mode"
        return f"{name}, {describe_step(optimizer, config.optimizer)}{more}"

    def may_draw(self, config: Config) -> bool:
        """Whether the optimizer is code of the user's own, which may draw random numbers."""
        return config.optimizer.name not in OPTIMIZERS

    def explain_rate(self, config: Config, rate: Rate, batches: BatchPlan, epochs: int, steps: int) -> tuple[Rate, int]:
        """The rate with its reason, and the optimizer steps for each step of the scheduler; 0 without one.

        `steps` is the run's length, which max_steps may end before its epochs do; a scheduler for another is refused.
        """
        return rate, 0

    def set_rate(self, state: TrainState, plan: Plan, step: int) -> None:
        """Set the learning rates of optimizer step `step`, counted from 0."""
        set_rate(state.optimizer, plan.schedule.rate_at(step))

    def check_restored(self, plan: Plan) -> None:
        """The checkpoint, if there is one, is loaded: refuse a scheduler that ends before the run, or elsewhere now."""

    def adopt_weights(self, folder: str, world: World) -> None:
        """The folder has a completed run: its weights become those of the caller's model."""


def compute_rate_factors(model: nn.Module, config: OptimizerConfig) -> dict[str, float]:
    """What the rate is multiplied by, for each parameter that learns.

    The product of: the share of the part that the network's own `rate_factors` names by how its parameters begin, each
    pattern of optimizer.rates and each group of optimizer.groups that matches the name, and optimizer.layer_decay.
    RequestError: a pattern that matches nothing that learns, or no blocks for the decay.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parts: dict[str, float] = getattr(model, "rate_factors", {})
    factors = {name: next((parts[part] for part in parts if name.startswith(part)), 1.0) for name in names}
    for pattern in sorted(config.rates):  # a fixed order, so that a product has the same bits however it is written
        for name in match_names(names, pattern, f"optimizer.rates {pattern!r}", "parameter that learns"):
            factors[name] *= config.rates[pattern]
    for group in config.groups:
        for name in match_names(names, group["match"], f"optimizer.groups {group['match']!r}", "parameter that learns"):
            factors[name] *= group.get("lr_factor", 1.0)
    if config.layer_decay is not None:
        depths = measure_depths(model)
        deepest = max(depths.values())
        if not deepest:
            problem = f"optimizer.layer_decay {config.layer_decay:g}: the model has no repeated blocks that learn"
            raise RequestError(problem, remedy="optimizer.rates, with patterns of your own")
        for name in names:
            factors[name] *= decay_by_depth(config.layer_decay, depths[name], deepest)
    return factors


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A request whose settings, run folder and dataset are known."""

    user_config: Config  # the user's settings, with those of the run that is continued; written to config.yaml
    config: Config  # the same with what the checkpoint pins and this start found out; the run is built from it
    placement: Placement
    resume_point: ResumePoint
    source: DataSource
    factories: FromConfig

    @property
    def model(self) -> str:
        """The model's name: the dataset's own model where the user named none."""
        return self.config.model.name or self.source.model

    @property
    def strategy(self) -> type[Strategy]:
        """The planned strategy. Each process of a dry run, and a run in one process, trains with another."""
        return find_strategy(self.placement.strategy, exact=self.config.reproducibility.exact)

    @property
    def task(self) -> str:
        """The task's name: the dataset's own task where the user named none."""
        return self.config.task.name or self.source.task


@dataclass(frozen=True, kw_only=True)
class RunSpec(RunRequest):
    """A request that can be carried out."""

    plan: Plan
    data_fingerprint: DataFingerprint
    machine: Mapping[str, Any] = field(default_factory=dict)  # see `describe_machine`; empty without --exact
    base: Mapping[str, str] = field(default_factory=dict)  # what checkpoints record of the pretrained model
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # and of the network's code, once it is built

    @property
    def pinned(self) -> dict[str, Any]:
        """What a later command may not change, as resolved."""
        batches = self.plan.batches
        pinned = {
            "batch_size": batches.micro_batch,
            "global_batch_size": batches.global_batch,
            "lr": self.plan.schedule.peak,
            "amp": self.plan.precision,
            "model": self.model,
            "task": self.task,
        }
        pinned |= BEFORE_PINNED | {key: value for key in RESOLVED if (value := self.config.get(key)) != "auto"}
        return pinned | ({"machine": dict(self.machine)} if self.machine else {})

    def weights_metadata(self) -> dict[str, Any]:
        """What is stored with weights: the settings, and what of the data the weights depend on."""
        source = self.source
        network = {"model": self.model, "task": self.task, "input_shape": list(source.input_shape)}
        sizes = {"num_classes": source.num_classes, "outputs": source.num_outputs}
        tokens = {"vocabulary": text} if (text := source.codec.serialize()) else {}
        return flatten_settings(self.user_config) | {
            "learned": source.signature(),
            "built_for": network | sizes | tokens,
            **({"base": dict(self.base)} if self.base else {}),
            **({"code": dict(self.code)} if self.code else {}),
            **({"reference": "initial adapter"} if self.has_reference else {}),
        }

    def checkpoint_metadata(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of the run."""
        return {
            "settings": self.weights_metadata(),
            "written": sorted(self.user_config.explicit - OF_THE_COMMAND),
            "pins": self.pinned,
            "samples": self.plan.batches.samples,
            "data": self.data_fingerprint,
        }

    @property
    def begins_from_weights(self) -> bool:
        """Whether --init-from gives the weights, and not a checkpoint."""
        return bool(self.config.model.init_from and not self.resume_point.checkpoint)

    @property
    def has_reference(self) -> bool:
        """Whether preferences are compared with the adapter of --init-from; a run of an older version did not."""
        if manifest := self.resume_point.manifest:
            return "reference" in manifest["settings"]
        return self.begins_from_weights and self.source.noun == "pairs" and find_adapter(self.config) is not None

    @property
    def is_complete(self) -> bool:
        """Whether the folder holds this very run, completed."""
        manifest, summary = self.resume_point.manifest or {}, self.resume_point.summary or {}
        ended = bool(manifest) and summary.get("status") == "completed"
        return ended and (self.same_length or int(manifest["step"]) >= self.plan.schedule.total_steps)

    @property
    def same_length(self) -> bool:
        """Whether the run is as long as when its checkpoint was written."""
        stored = self.resume_point.manifest["settings"] if self.resume_point.manifest else None
        return stored is not None and all(self.user_config.get(key) == stored[key] for key in LENGTH)


def describe_machine(plan: Plan, placement: Placement) -> dict[str, Any]:
    """Describe the facts, except settings, that determine the bits of a result; a resume with --exact compares them."""
    facts = {"CPU threads": plan.threads, "device": plan.device, "torch version": torch.__version__}
    facts |= compute_checksums(placement.devices[0], plan.precision)
    if (device := placement.devices[0]).type == "cpu":
        return facts | {"device": f"{plan.device} with {torch.backends.cpu.get_cpu_capability()}"}
    return facts | _describe_gpu(device)


def _describe_gpu(device: torch.device) -> dict[str, Any]:
    """Return the versions of libraries, and the property of the GPU, that determine which kernels are selected."""
    try:
        driver, _ = read_driver(open_nvml())
    except NoNvml:
        driver = None
    return {
        "CUDA version": torch.version.cuda,
        "cuDNN version": torch.backends.cudnn.version(),
        "driver": driver,
        "number of multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
    }


def with_notes(spec: RunSpec, **notes: str | list[str]) -> RunSpec:
    """The same request with more said in its plan."""
    return replace(spec, plan=replace(spec.plan, notes={**spec.plan.notes, **notes}))


def with_micro_batch(spec: RunSpec, size: int) -> RunSpec:
    """The same request with another micro-batch; the global batch, and so the schedule, stay as they are."""
    batches = replace(spec.plan.batches, micro_batch=size)
    return replace(spec, plan=replace(spec.plan, batches=batches))
