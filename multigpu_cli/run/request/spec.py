"""A run as it was requested (RunRequest), and with its plan and all checks passed (RunSpec)."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from multigpu_cli.checkpoint.run_folder import ResumePoint
from multigpu_cli.checkpoint.snapshot import TrainState
from multigpu_cli.checkpoint.weights import check_fit, extra_state, read_weights
from multigpu_cli.config.resume_rules import OF_THE_COMMAND, flatten_settings
from multigpu_cli.config.schema import LENGTH, Config
from multigpu_cli.config.sources import dump
from multigpu_cli.data.fingerprint import DataFingerprint
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.collectives import broadcast_object, run_on_main_rank
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import adapt_model, find_adapter
from multigpu_cli.optimizers.build import StateLoader
from multigpu_cli.planning.plan import Plan
from multigpu_cli.runtime.model_call import unbind_call
from multigpu_cli.tasks.base import Loss


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A request whose settings, run folder and dataset are known.

    Attributes:
        user_config: the user's settings, with those of the run that is continued; written to config.yaml.
        config: the same with what the checkpoint pins or the start resolved; the parts are built from it.
        placement: strategy and devices.
        resume_point: run folder and checkpoint.
        source: the dataset.
        user_objects: live objects, in place of what the settings name.
    """

    user_config: Config
    config: Config
    placement: Placement
    resume_point: ResumePoint
    source: DataSource
    user_objects: "UserObjects | None" = None

    @property
    def model(self) -> str:
        """The model's name: the dataset's own model where the user named none."""
        return self.config.model.name or self.source.model

    @property
    def task(self) -> str:
        """The task's name: the dataset's own task where the user named none."""
        return self.config.task.name or self.source.task


@dataclass(frozen=True, kw_only=True)
class RunSpec(RunRequest):
    """A request that can be carried out.

    Attributes:
        plan: the arithmetic.
        data_fingerprint: of the dataset's contents.
        base: what checkpoints record of the pretrained model.
        code: what they record of the network's code; known once it is built.
    """

    plan: Plan
    data_fingerprint: DataFingerprint
    base: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

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
        if self.config.communication.bucket_cap_mb != "auto":
            pinned["bucket_cap_mb"] = self.config.communication.bucket_cap_mb
        return pinned | ({"machine": describe_machine(self.plan)} if self.config.reproducibility.exact else {})

    def as_yaml(self) -> str:
        """config.yaml: the user's settings."""
        live = f"# with live objects from Python, which --config does not bring back: {self.user_objects}\n"
        return (live if self.user_objects else "") + dump(self.user_config)

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
        manifest, ended = self.resume_point.manifest or {}, self.resume_point.summary or {}
        long_enough = self.same_length or manifest.get("step", 0) >= self.plan.schedule.total_steps
        return ended.get("status") == "completed" and long_enough

    @property
    def same_length(self) -> bool:
        """Whether the run is as long as when its checkpoint was written."""
        stored = self.resume_point.manifest["settings"] if self.resume_point.manifest else None
        return stored is not None and all(self.user_config.get(key) == stored[key] for key in LENGTH)


def describe_machine(plan: Plan) -> dict[str, Any]:
    """What the bits of a result depend on beside the settings: a run with --exact resumes only where all are equal."""
    capability = f" with {torch.backends.cpu.get_cpu_capability()}" if plan.device == "cpu" else ""
    return {"CPU threads": plan.threads, "device": plan.device + capability, "torch version": torch.__version__}


def with_notes(spec: RunSpec, **notes: str | list[str]) -> RunSpec:
    """The same request with more said in its plan."""
    return replace(spec, plan=replace(spec.plan, notes={**spec.plan.notes, **notes}))


def with_micro_batch(spec: RunSpec, size: int) -> RunSpec:
    """The same request with another micro-batch; the global batch, and so the schedule, stay as they are."""
    batches = replace(spec.plan.batches, micro_batch=size)
    return replace(spec, plan=replace(spec.plan, batches=batches))


@dataclass(frozen=True)
class UserObjects:
    """The live objects of a run from Python; the model is trained in place.

    Attributes:
        source: the dataset.
        model: on any device; all ranks start from rank 0's weights.
        criterion: outputs and targets → loss; None: the task that the configuration or the dataset names.
        optimizer: over the model's parameters; None: the configuration's.
        scheduler: of that optimizer; without one the optimizer's rates stay constant.
        scheduler_interval: when the scheduler steps: "epoch" or "step"; None: as what it was made for tells.
        ddp: further arguments of DistributedDataParallel.
    """

    source: DataSource
    model: nn.Module
    criterion: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None
    scheduler_interval: str | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        live = (self.model, self.criterion, self.optimizer, self.scheduler)
        return ", ".join(getattr(each, "__name__", type(each).__name__) for each in live if each is not None)

    @property
    def parts_by_name(self) -> tuple[str, ...]:
        """The parts that are built from names in the settings."""
        return (() if self.criterion else ("task",)) + (() if self.optimizer else ("optimizer", "schedule"))

    def explain_rate(self, interval: str) -> str:
        """Where the learning rate comes from, for the plan."""
        scheduler = f", moved by {type(self.scheduler).__name__} after each {interval}"
        return f"that of your {type(self.optimizer).__name__}{scheduler if self.scheduler else ''}"

    def prepare_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The user's optimizer, with its state on the model's device.

        Raises:
            RequestError: it does not hold exactly the trainable parameters, or it is LBFGS.
        """
        if self.optimizer is None:
            return None
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise RequestError(
                "optimizer: LBFGS is not supported: it evaluates the loss several times per step",
                remedy="another optimizer",
            )
        moved = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in moved]
        strange = moved - {id(p) for p in model.parameters()}
        if left or strange:
            what = f"does not move {', '.join(left[:4])}" if left else f"moves {len(strange)} parameter(s) not its own"
            raise RequestError(
                f"optimizer: it {what}",
                remedy="build it from this model's parameters(), and freeze others with requires_grad_(False)",
            )
        StateLoader(self.optimizer)  # for this load, and for that of a checkpoint
        if self.optimizer.state:
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # moves it to the parameters' device
        return self.optimizer

    def step_scheduler(self, state: TrainState, step: int, every: int) -> None:
        """Step the scheduler up to its position before optimizer step `step`, counted from 0: once in `every`."""
        if self.scheduler is None:
            return
        wanted = step // every
        with warnings.catch_warnings():
            # after a resume the optimizer has stepped, in the attempt before
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while state.progress.scheduled < wanted:
                if isinstance(self.scheduler, ReduceLROnPlateau):
                    self.scheduler.step(state.progress.last["val_loss"])
                else:
                    self.scheduler.step()
                state.progress.scheduled += 1

    def load_weights(self, folder: str, world: World) -> None:
        """Load the weights of a completed run into the model."""
        model = adapt_model(self.model).to(world.device)
        files = [Path(folder, name) for name in ("best.pt", "last.pt")]
        state = run_on_main_rank(
            world, lambda: read_weights(next((file for file in files if file.is_file()), files[0]))
        )
        check_fit(model, state, folder)
        model.load_state_dict(state)
        unbind_call(self.model)


def broadcast_weights(model: nn.Module, world: World) -> None:
    """Give all ranks rank 0's weights: each may have drawn other random numbers."""
    if world.size > 1:
        state = model.state_dict()
        for value in state.values():
            if isinstance(value, Tensor):
                dist.broadcast(value, src=0)
        if extra := extra_state(state):
            state.update(broadcast_object(world, extra))
            model.load_state_dict(state)
