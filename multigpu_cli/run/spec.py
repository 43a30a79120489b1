"""Resolves a request into a RunSpec: folder, data and plan, all checked before anything is written."""

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multigpu_cli.checkpoint.run_folder import ResumePoint
from multigpu_cli.config.own_code import NAMING, check_code
from multigpu_cli.config.resume_rules import OF_THE_COMMAND, flatten_settings, merge_with_checkpoint, replace_settings
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.sources import dump
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.fingerprint import DataFingerprint, compute_fingerprint
from multigpu_cli.environments.registry import ENVIRONMENTS
from multigpu_cli.errors import RequestError, combine_errors
from multigpu_cli.planning.batch import BatchPlan, plan_batches
from multigpu_cli.planning.learning_rate import BASE_LR, Rate, plan_schedule, resolve_learning_rate
from multigpu_cli.planning.plan import Plan
from multigpu_cli.run.resume_point import agree_on_start
from multigpu_cli.run.validate_request import check_data, check_device, describe_machine, raise_all
from multigpu_cli.runtime.device_placement import Placement, count_cores
from multigpu_cli.runtime.precision import agree_on_precision
from multigpu_cli.runtime.rank_errors import run_on_all_ranks
from multigpu_cli.runtime.torch_settings import set_threads_per_rank
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.open_data import find_data_factory, open_data

if TYPE_CHECKING:
    from multigpu_cli.run.user_objects import UserObjects

_PROVISIONAL = 32  # stands for --batch-size auto until it has been measured
_LENGTH = ("epochs", "max_steps", "env_steps", "episodes")


@dataclass(frozen=True)
class RunSpec:
    """A request that can be carried out.

    Attributes:
        user_config: the user's settings, with those of the run that is continued; written to config.yaml.
        config: the same with what the checkpoint pins or the start resolved; the parts are built from it.
        placement: strategy and devices.
        start: run folder and checkpoint.
        source: the dataset.
        plan: the arithmetic.
        model, task: names, the dataset's own where the user named none.
        data_fingerprint: of the dataset's contents.
        user_objects: live objects, in place of what the settings name.
    """

    user_config: Config
    config: Config
    placement: Placement
    start: ResumePoint
    source: DataSource
    plan: Plan
    model: str
    task: str
    data_fingerprint: DataFingerprint
    user_objects: "UserObjects | None" = None

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
        """What weights are labelled with: the settings, and what of the data they mean nothing without."""
        source = self.source
        network = {"model": self.model, "task": self.task, "input_shape": list(source.input_shape)}
        sizes = {"num_classes": source.num_classes, "outputs": source.num_outputs}
        tokens = {"vocabulary": source.vocabulary.serialize()} if source.vocabulary else {}
        return flatten_settings(self.user_config) | {
            "learned": source.signature(),
            "built_for": network | sizes | tokens,
        }

    def checkpoint_metadata(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of the run."""
        written = sorted(self.user_config.explicit - OF_THE_COMMAND)
        facts = {"settings": self.weights_metadata(), "written": written, "pins": self.pinned}
        return facts | {"samples": self.plan.batches.samples, "data": self.data_fingerprint}

    @property
    def nothing_to_do(self) -> bool:
        """Whether the folder holds this very run, completed."""
        manifest, ended = self.start.manifest or {}, self.start.summary or {}
        long_enough = self.same_length or manifest.get("step", 0) >= self.plan.schedule.total_steps
        return ended.get("status") == "completed" and long_enough

    @property
    def same_length(self) -> bool:
        """Whether the run is as long as when its checkpoint was written."""
        stored = self.start.manifest["settings"] if self.start.manifest else None
        return stored is not None and all(self.user_config.get(key) == stored[key] for key in _LENGTH)


def resolve_spec(
    config: Config,
    placement: Placement,
    world: World,
    *,
    source: DataSource | None = None,
    user_objects: "UserObjects | None" = None,
) -> RunSpec:
    """Choose the folder, take over what its checkpoint pins, load the data and do the sums.

    Args:
        source: the dataset, where it has been loaded already.
        user_objects: live objects, in place of what the settings name.

    Raises:
        RequestError: the request can't be carried out; nothing was touched.
    """
    start = agree_on_start(config, world)
    pinned: dict[str, Any] = {}
    user_config = config
    if start.manifest:
        pinned = start.manifest["pins"]
        origin = str(Path(str(start.checkpoint)).parents[1])
        user_config = merge_with_checkpoint(
            config, start.manifest["settings"], start.manifest["written"], pinned, origin
        )
    elif start.global_batch and not config.batch.global_size:
        pinned = {"global_batch_size": start.global_batch}
    command, config = config, replace_settings(user_config, _pinned_settings(pinned)) if pinned else user_config
    made = user_objects.parts_by_name if user_objects else NAMING
    check_code(config, command, str(start.checkpoint), environments=ENVIRONMENTS, parts=made)
    source = run_on_all_ranks(
        world, lambda: _open_source(config, placement, world, user_objects.source if user_objects else source)
    )
    mark = run_on_all_ranks(world, lambda: compute_fingerprint(source, config.reproducibility.seed))
    if world.size > 1:
        from multigpu_cli.run.rank_consistency import (  # late: alone, nothing is compared
            check_same_data,
            check_same_machine,
        )

        check_same_data(world, source, mark, config.data.name)
    plan = _make_plan(user_config, config, placement, world, start, source, user_objects)
    if world.size > 1 and config.reproducibility.exact:
        check_same_machine(world, describe_machine(plan))
    raise_all(check_data(config, plan, source, start, mark))
    model, task = config.model.name or source.model, config.task.name or source.task
    return RunSpec(user_config, config, placement, start, source, plan, model, task, mark, user_objects)


def _open_source(config: Config, placement: Placement, world: World, source: DataSource | None) -> DataSource:
    """The dataset; what is wrong with it is told together with what is wrong with the device."""
    wrong = list(check_device(config, placement, world))
    try:
        source = source or open_data(config)
    except RequestError as error:
        wrong.append(error)
        raise combine_errors(wrong) from error
    raise_all(wrong)
    return source


def with_micro_batch(spec: RunSpec, size: int) -> RunSpec:
    """The same request with another micro-batch; the global batch, and so the schedule, stay as they are."""
    batches = replace(spec.plan.batches, micro_batch=size)
    return replace(spec, plan=replace(spec.plan, batches=batches))


def with_measured_batch(spec: RunSpec, size: int, world: World, reason: str) -> RunSpec:
    """What --batch-size auto has found before the first step: it decides the global batch too, if nobody fixed one."""
    config = replace_settings(spec.config, {"batch_size": size})
    plan = _make_plan(spec.user_config, config, spec.placement, world, spec.start, spec.source, spec.user_objects)
    return replace(spec, config=config, plan=replace(plan, batch_size_reason=reason))


def _pinned_settings(pinned: dict[str, Any]) -> dict[str, Any]:
    """Settings that stand for the pins: accumulation is derived anew from the number of workers."""
    values = {key: value for key, value in pinned.items() if key in SETTINGS} | {"grad_accum_steps": None}
    return values | ({"base_lr": None} if "lr" in pinned else {})


def _make_plan(
    user_config: Config,
    config: Config,
    placement: Placement,
    world: World,
    start: ResumePoint,
    source: DataSource,
    user_objects: "UserObjects | None",
) -> Plan:
    workers = {"single": 1, "dp": len(placement.devices), "ddp": max(world.size, placement.num_processes_to_launch)}[
        placement.strategy
    ]
    size, whole = source.fixed_batch_sizes or (config.batch.size, config.batch.global_size)
    epochs = source.epochs or config.length.epochs
    batches = plan_batches(
        samples=source.num_train_samples,
        micro_batch=_PROVISIONAL if size == "auto" else int(size),
        workers=workers,
        accumulation=config.batch.grad_accum_steps,
        global_batch=whole,
        drop_last=config.batch.drop_last,
    )
    rate = _resolve_rate(config, batches, user_objects, pinned=start.manifest is not None)
    number = agree_on_precision(config.precision.amp, world, placement.devices)
    here = len(placement.devices) if placement.num_processes_to_launch else world.local_size
    name, task = config.model.name or source.model, config.task.name or source.task
    given, exactly = user_config.rate.lr is not None, " with --exact" if config.reproducibility.exact else ""
    return Plan(
        placement_reason=f"{placement.strategy}{exactly}: {placement.reason}",
        strategy=placement.strategy,
        device=_device_name(world),
        batches=batches,
        rate=rate,
        schedule=plan_schedule(
            peak=rate.value,
            shape=config.rate.schedule,
            steps_per_epoch=batches.steps_per_epoch,
            epochs=epochs,
            max_steps=config.length.max_steps,
            warmup_epochs=config.rate.warmup_epochs,
            args=config.rate.args,
        ),
        base_lr=None if given else user_config.rate.base_lr or BASE_LR[config.optimizer.name],
        base_batch_size=config.rate.base_batch_size,
        precision=number.name,
        precision_reason="as the run was started with" if start.manifest else number.reason,
        description=f"{name} on {config.data.name} "
        f"({source.note}{source.num_train_samples:,} training samples), {task}",
        resume_reason=start.reason,
        unused_flags=_list_unused_flags(config, placement, user_objects),
        save_dir=start.folder,
        epochs=epochs,
        batch_size_reason="to be measured before the first step" if config.batch.size == "auto" else "",
        threads=set_threads_per_rank(here, count_cores(), exact=config.reproducibility.exact),
        compiled=_describe_compile(config, placement),
    )


def _describe_compile(config: Config, placement: Placement) -> str:
    mode, overlaps = config.model.compile, placement.strategy == "ddp" and not config.reproducibility.exact
    pieces = ", inside DDP: in pieces that end with its buckets, so that these travel during backward"
    return "" if mode == "off" else mode + (pieces if overlaps else "")


def _list_unused_flags(config: Config, placement: Placement, user_objects: "UserObjects | None") -> list[str]:
    """Flags that somebody gave and that do nothing here; said rather than passed over."""
    about_data = {"mode", "data_dir"}
    if not user_objects:
        about_data -= inspect.signature(find_data_factory(config)).parameters.keys()
    about_ddp = (
        {"grad_compression", "bucket_cap_mb", "find_unused_parameters"} if placement.strategy != "ddp" else set()
    )
    about_gpus = {"data_on_device"} if placement.devices[0].type == "cpu" else set()
    said = [SETTINGS[key].flag or key for key in sorted((about_ddp | about_gpus | about_data) & config.explicit)]
    return said + sorted(user_objects.ddp if user_objects and about_ddp else ())


def _resolve_rate(config: Config, batches: BatchPlan, user_objects: "UserObjects | None", *, pinned: bool) -> Rate:
    rate = resolve_learning_rate(
        given=config.rate.lr,
        base=config.rate.base_lr,
        base_batch=config.rate.base_batch_size,
        global_batch=batches.global_batch,
        rule=config.rate.lr_scaling,
        optimizer=config.optimizer.name,
    )
    if user_objects and user_objects.optimizer:
        return rate._replace(reason=f"{rate.value:.4g}, {user_objects.explain_rate()}")
    return rate._replace(reason=f"{rate.value:.4g}, as the run was started with") if pinned else rate


def _device_name(world: World) -> str:
    if world.device.type != "cuda":
        return world.device.type
    return torch.cuda.get_device_name(world.device)
