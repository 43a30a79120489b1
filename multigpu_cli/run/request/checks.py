"""Checks that need the device, the data or the other ranks; that memory suffices."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from multigpu_cli.capabilities import ACTORS, TASKS
from multigpu_cli.config.schema import Config
from multigpu_cli.data.class_weights import find_unlike_label, resolve_class_weights, resolve_sample_weights
from multigpu_cli.data.fingerprint import DataFingerprint, describe_differences
from multigpu_cli.data.load import FROM_MODEL, uses_environments
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World, all_gather_object
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.monitor.format import format_bytes
from multigpu_cli.optimizers.eval_weights import list_unsaved_parameters
from multigpu_cli.planning.memory import Memory
from multigpu_cli.run.request.spec import FromConfig, RunSpec
from multigpu_cli.runtime.precision import choose_precision
from multigpu_cli.strategies.base import find_strategy

_CLASS_SETTINGS = ("task.class_weights", "data.sample_weights", "data.mixup", "data.cutmix")
_SAME_DATA = (
    "the data that it was started with, in any --data-dir; or a new run with --resume never and another --save-dir "
    "(--init-from starts it from these weights)"
)


def check_device(config: Config, placement: Placement, world: World) -> Iterator[RequestError]:
    """Requested options that this device or strategy does not support."""
    on_cpu = world.device.type == "cpu"
    strategy = find_strategy(placement.strategy, exact=config.reproducibility.exact)
    yield from strategy.find_errors(config, max(world.size, placement.num_processes_to_launch))
    if placement.strategy == "dp" and uses_environments(config):
        yield RequestError(f"--multi-gpu dp does not support --task {', '.join(ACTORS)}", remedy="--multi-gpu ddp")
    if placement.strategy == "dp" and config.task.name == FROM_MODEL:
        problem = "--task from-model can't be used with --multi-gpu dp: replicas return means, which can't be combined"
        yield RequestError(problem, remedy="--multi-gpu ddp")
    if placement.strategy == "dp" and config.model.compile != "off":  # pytorch#94636; CUDA graphs in threads: #123177
        reason = "torch compiles for one GPU, and replicas on other GPUs can't run that code"
        problem = f"--compile {config.model.compile} can't be used with --multi-gpu dp: {reason}"
        yield RequestError(problem, remedy="--multi-gpu ddp, or --compile off")
    try:
        choose_precision(config.precision.amp, world.device)
    except RequestError as error:
        yield error
    if config.model.sync_bn and (placement.strategy in ("single", "dp") or (placement.strategy == "ddp" and on_cpu)):
        yield RequestError("--sync-bn works with ddp on GPUs only", remedy="leave out --sync-bn")
    if config.communication.grad_compression == "bf16" and placement.strategy == "ddp" and on_cpu:
        yield RequestError("--grad-compression bf16 needs NCCL, this run is on CPU", remedy="--grad-compression fp16")


def _check_class_settings(spec: RunSpec) -> Iterator[RequestError]:
    """Settings that are for the classes of samples, where there are none, or others."""
    wanted = {key: spec.config.get(key) for key in _CLASS_SETTINGS}
    given = [key for key, value in wanted.items() if value is not None]
    if given and spec.task in TASKS and spec.task != "classification":
        yield RequestError(f"{given[0]} is for --task classification, not {spec.task}", remedy=f"leave {given[0]} out")
        return
    counts = "balanced" in wanted.values() or wanted["data.sample_weights"] is not None
    if counts and (error := find_unlike_label(spec.source)):
        yield error
        return
    for key, check in (("task.class_weights", resolve_class_weights), ("data.sample_weights", resolve_sample_weights)):
        try:
            if wanted[key] is not None:
                check(wanted[key], spec.source, key)
        except RequestError as error:
            yield error


def check_data(spec: RunSpec) -> Iterator[RequestError]:
    """Requested options that do not fit the data, or what the run folder holds."""
    config, plan, start, fingerprint = spec.config, spec.plan, spec.resume_point, spec.data_fingerprint
    if config.model.sync_bn and not plan.batches.is_even:
        yield RequestError(
            "--sync-bn needs the same number of micro-batches on every worker in every step, including an epoch's last",
            remedy="--drop-last, and a --global-batch-size that is a multiple of batch size × workers",
        )
    if config.length.early_stopping_patience and spec.source.val is None:
        problem = f"--early-stopping-patience needs a validation split, and --data {config.data.name} has none"
        remedy = "leave out --early-stopping-patience, or use data with a validation split (val)"
        yield RequestError(problem, remedy=remedy)
    moved = [key for key in ("data.random_resized_crop", "data.rand_augment") if config.get(key) is not None]
    if moved and spec.source.form.ignored is not None and not start.manifest:  # older versions began such runs
        problem = f"{moved[0]}: it would change the place of pixels in images, and not in their masks"
        yield RequestError(problem, remedy="leave it out, and augment images and masks together in your own dataset")
    unread = [] if start.manifest else list(spec.factories.find_unread(config, spec.task))  # a resumed run passed
    yield from unread or _check_class_settings(spec)
    pinned = start.manifest["pins"].get("machine", {}) if start.manifest else {}
    for name, now in spec.machine.items():
        if pinned.get(name, now) != now:  # see `find_unpinned_facts`
            yield RequestError(
                f"--exact: {start.folder} was started with {name} {pinned[name]}, here it is {now}: bits would differ",
                remedy="resume on a machine like the one it was started on, or start a new run with another --save-dir",
            )
    if not start.manifest:
        return
    if (before := start.manifest["samples"]) != plan.batches.samples:
        problem = f"--data: {plan.batches.samples} training samples now, but {start.folder} was started with {before}"
        yield RequestError(problem, remedy=_SAME_DATA)
    elif other := describe_differences(start.manifest.get("data", fingerprint), fingerprint):  # not in old ones
        differing = ", ".join(other) + (f" in --data-dir {config.data.dir}" if config.data.dir else "")
        problem = f"--data {config.data.name}: {differing} differ from what {start.folder} was started with"
        yield RequestError(problem, remedy=_SAME_DATA)


def find_unpinned_facts(spec: RunSpec) -> Iterator[str]:
    """Yield a warning if an older version started a run with --exact without facts on which its bits depend."""
    start = spec.resume_point
    pinned = start.manifest["pins"].get("machine", {}) if start.manifest else spec.machine
    if missing := ", ".join(name for name in spec.machine if name not in pinned):
        yield f"--exact: an older version started {start.folder} without {missing}: resume it on the same machine only"


def check_same_data(world: World, source: DataSource, fingerprint: DataFingerprint, name: str) -> None:
    """Compare the fingerprint of the data over all ranks; a RequestError on each of them names nodes that differ."""
    exact, sums = fingerprint
    lengths = [0 if split is None else len(split) for split in (source.train, source.val, source.test)]  # type: ignore[arg-type]
    own = [[*exact, source.num_train_samples, *lengths], list(sums)]
    marks, numbers = zip(*all_gather_object(world, own), strict=True)
    groups = group_ranks(marks, numbers)
    if len(set(groups)) > 1:
        raise _describe_difference(world, groups, marks, name)


def check_same_machine(world: World, pinned: Mapping[str, Any]) -> None:
    """Compare over all ranks the facts of the machine on which the bits of a result depend, for --exact."""
    facts = all_gather_object(world, {name: str(value) for name, value in pinned.items()})
    for name, first in facts[0].items():
        if odd := [rank for rank, each in enumerate(facts) if each[name] != first]:
            difference = f"{_list_ranks(odd)} would train with {name} {facts[odd[0]][name]}, rank 0 with {first}"
            remedy = "use machines and GPUs of one type, or leave out --exact"
            raise RequestError(f"--exact: {difference}: bits would differ", remedy=remedy, shared=True)


def group_ranks(marks: Sequence[Sequence[int]], sums: Sequence[Sequence[float]]) -> list[int]:
    """For each rank, the first rank whose data are the same."""

    def is_same(one: DataFingerprint, other: DataFingerprint) -> bool:
        return list(one[0]) == list(other[0]) and not describe_differences(one, other)

    fingerprints = list(zip(marks, sums, strict=True))
    return [next(rank for rank, other in enumerate(fingerprints) if is_same(other, each)) for each in fingerprints]


def _describe_difference(
    world: World, groups: Sequence[int], marks: Sequence[Sequence[int]], name: str
) -> RequestError:
    """The error that names the ranks whose data differ from the majority's, or from rank 0's if there is none."""
    times = Counter(groups)
    usual = max(times, key=lambda group: (times[group], -group))
    odd = [rank for rank, group in enumerate(groups) if group != usual]
    hosts = list(dict.fromkeys(world.hosts[rank] for rank in odd)) if len(set(world.hosts)) > 1 else []
    whole = [rank for rank in range(world.size) if world.hosts and world.hosts[rank] in hosts] == odd
    who = f"{', '.join(hosts)} ({_list_ranks(odd)})" if hosts and whole else _list_ranks(odd)
    here, there = marks[usual][4:], marks[odd[0]][4:]
    what = (
        f"{pluralize(there[0], 'training sample')} instead of {here[0]:,}" if here[0] != there[0] else "other contents"
    )
    if here[0] == there[0] and here != there:
        what = f"{there[1]:,}, {there[2]:,} and {there[3]:,} samples to train, validate and test on "
        what += f"instead of {here[1]:,}, {here[2]:,} and {here[3]:,}"
    remedy = "the same files on every node, and the whole dataset on every rank: the trainer divides it"
    return RequestError(f"--data {name}: {who} and the others see different data: {what}", remedy=remedy, shared=True)


def _list_ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:8]))}{' …' if numbers[8:] else ''}"


def check_state_fits(spec: RunSpec, model: nn.Module, device: torch.device) -> None:
    """Compare what does not depend on the batch with the memory of a GPU, and refuse what does not fit."""
    if device.type != "cuda" or any(map(is_lazy, model.parameters())):
        return
    capacity = torch.cuda.get_device_properties(device).total_memory
    needed = forecast_state(model, spec.config, spec.factories)
    if needed.total_bytes(0) <= capacity:
        return
    raise RequestError(
        f"--model {spec.model}: {format_bytes(needed.weights)} weights, {format_bytes(needed.gradients)} gradients and "
        f"{format_bytes(needed.optimizer)} optimizer state do not fit one GPU of {format_bytes(capacity)}",
        remedy=find_strategy(spec.config.device.multi_gpu).memory_remedy,  # not the forecast's, of one process
    )


def refuse_single_samples(spec: RunSpec) -> None:
    """Refuse a run for which --multi-gpu auto chose ddp, and in which not even one sample fits."""
    if spec.config.device.multi_gpu == "auto" and spec.placement.strategy == "ddp" and spec.plan.batches.workers > 1:
        problem = "out of memory with a single sample on each of several devices"
        raise RequestError(problem, remedy=f"{spec.strategy.memory_remedy}; or --grad-checkpointing, or --amp bf16")


def forecast_state(model: nn.Module, config: Config, factories: FromConfig) -> Memory:
    """Bytes without activations."""
    weights = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    averaged = 0 if config.optimizer.ema == "off" else weights
    if averaged and not find_strategy(config.device.multi_gpu).sharded and list_unsaved_parameters(model):
        averaged = gradients  # the average shares what never changes
    optimizer = factories.measure_optimizer(config, model)
    return Memory(weights=weights + averaged, gradients=gradients, optimizer=optimizer, fixed=0, per_sample=0)
