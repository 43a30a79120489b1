"""Validation rules that need the device or the data."""

from collections.abc import Iterable, Iterator

import torch

from multigpu_cli.config.schema import Config
from multigpu_cli.config.sharding_rules import find_group_errors, find_sharding_errors
from multigpu_cli.data.class_weights import resolve_class_weights, resolve_sample_weights
from multigpu_cli.data.fingerprint import describe_differences
from multigpu_cli.errors import RequestError, combine_errors
from multigpu_cli.run.spec import RunSpec, describe_machine
from multigpu_cli.runtime.choose_strategy_and_devices import Placement
from multigpu_cli.runtime.precision import choose_precision
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.open_data import FROM_MODEL, uses_environments
from multigpu_cli.tasks.registry import TASKS

_CLASS_SETTINGS = ("task.class_weights", "data.sample_weights", "data.mixup", "data.cutmix")
_SMOOTHED = ("classification", "multi-label", "language-model", "dpo")
_SAME_DATA = (
    "the data that it was started with, in any --data-dir; or a new run with --resume never and another --save-dir "
    "(--init-from starts it from these weights)"
)


def raise_all(errors: Iterable[RequestError]) -> None:
    """Raise all errors as one RequestError, if there are any."""
    if listed := list(errors):
        raise combine_errors(listed)


def check_device(config: Config, placement: Placement, world: World) -> Iterator[RequestError]:
    """Requested options that this device or strategy does not support."""
    on_cpu = world.device.type == "cpu"
    if placement.shards:
        yield from _check_sharding(config, max(world.size, placement.num_processes_to_launch))
    if placement.strategy == "dp" and uses_environments(config):
        yield RequestError("--multi-gpu dp does not support --task ppo", remedy="--multi-gpu ddp")
    if placement.strategy == "dp" and config.task.name == FROM_MODEL:
        yield RequestError(
            "--task from-model together with --multi-gpu dp: a replica returns a mean, and nobody knows over how much",
            remedy="--multi-gpu ddp",
        )
    if placement.strategy == "dp" and config.model.compile != "off":  # pytorch#94636; CUDA graphs in threads: #123177
        yield RequestError(
            f"--compile {config.model.compile} together with --multi-gpu dp: torch compiles a model for one GPU, and "
            "replicas on other GPUs can't run it",
            remedy="--multi-gpu ddp, or --compile off",
        )
    try:
        choose_precision(config.precision.amp, world.device)
    except RequestError as error:
        yield error
    if config.model.sync_bn and not placement.shards and (on_cpu or placement.strategy != "ddp"):
        yield RequestError("--sync-bn works with ddp on GPUs only", remedy="leave out --sync-bn")
    if config.communication.grad_compression == "bf16" and placement.strategy == "ddp" and on_cpu:
        yield RequestError("--grad-compression bf16 needs NCCL, this run is on CPU", remedy="--grad-compression fp16")


def _check_sharding(config: Config, workers: int) -> Iterator[RequestError]:
    """What --multi-gpu fsdp does not take, now that the settings of a checkpoint are known too."""
    from torch.distributed.fsdp import FSDPModule  # late: seconds, for this strategy only

    yield from find_sharding_errors(config, acts=uses_environments(config))
    yield from find_group_errors(config.device.shard_size, workers)
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        yield RequestError(
            f"--multi-gpu fsdp: fully_shard of torch {torch.__version__} can't sum gradients",
            remedy="a newer torch, or --multi-gpu ddp",
        )
    if config.communication.find_unused_parameters and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        yield RequestError(
            f"--find-unused-parameters together with --multi-gpu fsdp: torch {torch.__version__} can't do it",
            remedy="--freeze what takes no part in the loss, torch 2.13, or --multi-gpu ddp",
        )
    if config.batch.size == "auto" and not hasattr(FSDPModule, "reset_iter_state"):
        yield RequestError(
            f"--batch-size auto together with --multi-gpu fsdp: torch {torch.__version__} can't go on after a pass "
            "that ran out of memory",
            remedy="a number, such as --batch-size 8, or torch 2.13",
        )
    if config.reproducibility.exact and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        yield RequestError(
            f"--exact: fully_shard of torch {torch.__version__} can't sum gradients in a fixed order",
            remedy="a newer torch, or --multi-gpu ddp",
        )


def _check_class_settings(spec: RunSpec) -> Iterator[RequestError]:
    """Settings that are for the classes of samples, where there are none, or others."""
    wanted = {key: spec.config.get(key) for key in _CLASS_SETTINGS}
    given = [key for key, value in wanted.items() if value is not None]
    if given and spec.task in TASKS and spec.task != "classification":
        yield RequestError(f"{given[0]} is for --task classification, not {spec.task}", remedy=f"leave {given[0]} out")
        return
    resolvers = {"task.class_weights": resolve_class_weights, "data.sample_weights": resolve_sample_weights}
    for key, resolve in resolvers.items():
        try:
            if wanted[key] is not None:
                resolve(wanted[key], spec.source, key)
        except RequestError as error:
            yield error


def _check_loss_settings(spec: RunSpec) -> Iterator[RequestError]:
    """Settings that the loss of a new run does not read; a run that was begun with them goes on."""
    task, objects = spec.config.task, spec.user_objects
    if spec.resume_point.manifest:
        return
    if objects and objects.criterion:
        given = {"label_smoothing": task.label_smoothing, "task.class_weights": task.class_weights}
        for key in filter(given.get, given):
            remedy = "criterion=nn.CrossEntropyLoss(weight=…, label_smoothing=…), say"
            yield RequestError(f"{key} does not reach the criterion", remedy=remedy)
    elif task.label_smoothing and spec.task in TASKS and spec.task not in _SMOOTHED:
        yield RequestError(
            f"--label-smoothing is for --task {', '.join(_SMOOTHED)}, not {spec.task}", remedy="--label-smoothing 0"
        )


def check_data(spec: RunSpec) -> Iterator[RequestError]:
    """Requested options that do not fit the data, or what the run folder holds."""
    config, plan, start, fingerprint = spec.config, spec.plan, spec.resume_point, spec.data_fingerprint
    if config.model.sync_bn and not plan.batches.is_even:
        yield RequestError(
            "--sync-bn needs the same number of micro-batches on every worker in every step, including an epoch's last",
            remedy="--drop-last, and a --global-batch-size that is a multiple of batch size × workers",
        )
    if config.length.early_stopping_patience and spec.source.val is None:
        yield RequestError(
            f"--early-stopping-patience needs a validation split, and --data {config.data.name} has none",
            remedy="leave out --early-stopping-patience, or use data with a validation split (val)",
        )
    yield from list(_check_loss_settings(spec)) or _check_class_settings(spec)
    pinned = start.manifest["pins"].get("machine", {}) if start.manifest else {}
    for name, now in describe_machine(plan).items() if pinned else ():
        if pinned[name] != now:
            yield RequestError(
                f"--exact: {start.folder} was started with {name} {pinned[name]}, here it is {now}: bits would differ",
                remedy="resume on a machine like the one it was started on, or start a new run with another --save-dir",
            )
    if not start.manifest:
        return
    if (before := start.manifest["samples"]) != plan.batches.samples:
        yield RequestError(
            f"--data: {plan.batches.samples} training samples now, but {start.folder} was started with {before}",
            remedy=_SAME_DATA,
        )
    elif other := describe_differences(start.manifest.get("data", fingerprint), fingerprint):  # not in old ones
        where = f" in --data-dir {config.data.dir}" if config.data.dir else ""
        yield RequestError(
            f"--data {config.data.name}: {', '.join(other)}{where} differ from what {start.folder} was started with",
            remedy=_SAME_DATA,
        )
