"""The measurements behind a plan: times and memory of one worker, with the user's own model and data."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import ceil, inf
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multigpu_cli.checkpoint.pieces import iterate_tensors
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config, DeviceConfig
from multigpu_cli.data.load import check_has_samples
from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.placement import Placement, count_cores
from multigpu_cli.distributed.process_group import join_workers, place_on_machine, process_group
from multigpu_cli.distributed.world import World, all_gather, all_reduce_max
from multigpu_cli.launch import run_in_workers
from multigpu_cli.models.blocks import find_blocks_to_wrap
from multigpu_cli.optimizers.build import set_rate
from multigpu_cli.planning.memory import Memory, Sharding, fit_line
from multigpu_cli.planning.speedup import Link, StepTimes, buckets
from multigpu_cli.run.assembly.assemble import build_components
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.batch_size import fit_batch_sizes_to_memory
from multigpu_cli.run.global_batch import rehearse_global_loss
from multigpu_cli.run.part import load_parts
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.run.step import MicroBatchProfile, forward_backward, profile_micro_batch
from multigpu_cli.runtime.seeding import limit_threads
from multigpu_cli.strategies.base import find_strategy
from multigpu_cli.strategies.ddp import measure_cap

_LONGEST_WAIT = 300.0  # seconds
_SINGLE: dict[str, Any] = {"nproc_per_node": None}
_IN_STEPS = Link("measured", 0.0, inf, "measured here in the sharded steps of as many workers", overlaps=False)


@dataclass(frozen=True)
class SingleWorkerProfile:
    """One worker, measured.

    `works` are, by number of workers, the times of one of them. On a CPU they were measured at the same time, as far as
    there are cores, because they share its memory and its clock. On GPUs one measurement stands for all.
    """

    components: TrainComponents
    works: dict[int, StepTimes]
    wire: Link | None  # link between the workers of a CPU, measured in their steps; None if not measured
    sharding: Sharding | None
    memory: Memory
    flops_per_sample: float
    note: str  # what the memory probe changed
    probes: tuple[float, ...]  # seconds of a step of one CPU worker, before and after those of several


def threads_per_worker(workers: int) -> int:
    """CPU threads of each of so many workers; a single one keeps the number that the user set."""
    return min(torch.get_num_threads(), count_cores()) if workers == 1 else max(1, count_cores() // workers)


def place_on_one_device(device: DeviceConfig) -> Placement:
    """One process on the first device that the settings allow."""
    return place_on_machine(replace(device, multi_gpu="none", nproc_per_node=None))


def measure_worker(config: Config, counts: list[int]) -> SingleWorkerProfile:
    """Build the model on one device and take some steps, which leave nothing behind."""
    check_has_samples(config, "a forecast")
    placement = place_on_one_device(config.device)
    world = World(placement.devices[0])
    with TemporaryDirectory(prefix="multigpu-plan-") as folder:
        components, note = build_probed(replace_settings(config, _SINGLE), placement, world, folder)
        with closing(components.loaders):
            size = components.plan.batches.micro_batch
            whole, half = profile_micro_batch(components, size), profile_micro_batch(components, max(1, size // 2))
            sharding = measure_sharding(components)
            probes: tuple[float, ...] = ()
            if world.device.type == "cpu":
                works, wire = _measure_on_cores(components, config, counts, sharding)
                if 1 in works and len(works) > 1:
                    probes = works[1].own_seconds, _measure_alone(components).own_seconds
            else:
                works, wire = dict.fromkeys(counts, _measure_alone(components)), None
            if sharding:
                works = {count: replace(work, sharding=sharding) for count, work in works.items()}
            memory = _measure_memory(components, whole, half)
            return SingleWorkerProfile(components, works, wire, sharding, memory, whole.flops_per_sample, note, probes)


def _measure_on_cores(
    components: TrainComponents, config: Config, counts: list[int], sharding: Sharding | None
) -> tuple[dict[int, StepTimes], Link | None]:
    """The times of one of so many CPU workers, and the wire between the largest group with a core for each worker.

    For more workers than cores: the times of one worker on its own core, and the wire between as many workers as cores,
    which sharded steps do not measure.
    """
    works, wire = {}, None
    for workers in counts:
        if not 1 < workers <= count_cores():
            with limit_threads(threads_per_worker(workers)):
                works[workers] = _measure_alone(components)
        elif sharding:
            works[workers] = _measure_sharded(config, sharding, workers)
        else:
            works[workers], wire = _measure_together(config, workers)
    if sharding:
        return works, _IN_STEPS if 1 < max(counts) <= count_cores() else None
    if wire is None and max(counts) > count_cores() > 1:
        _, wire = _measure_together(config, count_cores())
    return works, wire


def _measure_alone(components: TrainComponents) -> StepTimes:
    data, forward, backward, commit = median_step(time_steps(components)[None])
    return StepTimes(data, forward, backward, commit, *_messages_of_step(components))


def _measure_together(config: Config, workers: int) -> tuple[StepTimes, Link]:
    """Times of several processes that take their steps together.

    The wire is measured between these steps: it is slower there than in a loop that does nothing else (the step has
    filled the caches, and the threads that send the bytes have to wake up).
    """
    placement = Placement("ddp", (torch.device("cpu"),) * workers, workers, "plan")
    messages, after, seconds = run_in_workers(placement, _run_worker, config)[0]
    data, forward, backward, commit, *sent = seconds
    points = list(zip(_message_sizes(messages, after), sent, strict=True))
    reduction = sum(sent if after else sent[:-1])  # training does not send those 8 bytes
    work = StepTimes(data, forward, backward, commit, messages, after, reduction)
    return work, Link.from_measurements("gloo, between steps", workers, points, overlaps=False)


def _measure_sharded(config: Config, sharding: Sharding, workers: int) -> StepTimes:
    size, _ = sharding.split_workers(workers)
    own = replace_settings(config, {"nproc_per_node": None, "shard_size": size if size < workers else None})
    placement = Placement("fsdp", (torch.device("cpu"),) * workers, workers, "plan")
    data, forward, backward, commit, gathers, reduction = run_in_workers(placement, _run_sharded_worker, own)[0]
    groups = tuple(map(float, sharding.groups))
    gather = gathers / sharding.gathers(1)
    return StepTimes(data, forward, backward, commit, groups, reduction=reduction, gather=gather)


def _message_sizes(messages: Sequence[float], after: float) -> list[float]:
    """Bytes of each message that one step sends: the gradient buckets, then what follows them, or 8 for the latency."""
    return [*messages, after or 8.0]


def _messages_of_step(components: TrainComponents, world: World | None = None) -> tuple[tuple[float, ...], float]:
    """Bytes that a step sends, in each message during backward and after it; with a world, cap auto is measured."""
    config, model = components.spec.config, components.state.model
    gradient = sum(p.nbytes for p in components.strategy.local_parameters)
    after = 8.0 * sum(buffer.numel() for buffer in model.buffers())
    if sharding := measure_sharding(components):
        return tuple(map(float, sharding.groups)), after
    if config.reproducibility.exact:
        return (), float(gradient + sum(buffer.nbytes for buffer in model.buffers()))
    cap: Any = config.communication.bucket_cap_mb
    if cap == "auto":
        cap = measure_cap(model, world) if world else None
    share = 0.5 if config.communication.grad_compression in ("fp16", "bf16") else 1.0
    return tuple(share * size for size in buckets(gradient, cap)), after


def measure_sharding(components: TrainComponents) -> Sharding | None:
    """What --multi-gpu fsdp gathers as one; None with another strategy."""
    device, exact = components.config.device, components.config.reproducibility.exact
    model = components.state.model
    if device.multi_gpu != "fsdp":
        return None
    counted: set[torch.Tensor] = set()
    sizes = []
    for name in [*find_blocks_to_wrap(model, device.wrap), ""]:  # inner ones first; the whole model has the rest
        own = set(model.get_submodule(name).parameters()) - counted
        sizes.append(sum(parameter.nbytes for parameter in own))
        counted |= own
    *blocks, rest = sizes
    wire = components.config.communication
    dtype = wire.param_dtype
    if dtype == "auto":
        (dtype,) = find_strategy("fsdp").measure_settings(model, components.config, components.world).values()
    kept, size, each_pass = device.reshard == "step", device.shard_size, wire.reduce == "pass"
    sharding = Sharding(blocks=tuple(blocks), rest=rest, keeps_weights=kept, group_size=size, exact=exact)
    return replace(sharding, each_pass=each_pass, share=0.5 if dtype == "bf16" else 1.0)


def _run_worker(config: Config) -> tuple[tuple[float, ...], float, list[float]]:
    """Take steps together with the other workers: bytes of the messages during backward and after it, and the times."""
    cpu = torch.device("cpu")
    with process_group(LaunchEnv.current(), cpu, timeout=_LONGEST_WAIT) as world, TemporaryDirectory() as folder:
        alone = World(cpu, local_size=world.size)  # so that loader processes are shared out among the workers
        placement = Placement("single", (cpu,), 0, "plan")
        components, _ = build_probed(replace_settings(config, _SINGLE), placement, alone, folder)
        with closing(components.loaders), limit_threads(threads_per_worker(world.size)):
            messages, after = _messages_of_step(components, world)
            parts = [ceil(size / 4 / world.size) for size in _message_sizes(messages, after)]
            tensors = [torch.zeros(part * world.size) for part in parts]
            times = torch.stack(all_gather(world, time_steps(components, world, tensors)))
        return messages, after, median_step(times)


def _run_sharded_worker(config: Config) -> list[float]:
    """Take sharded steps together with the other workers: the times of their phases, and of what they send."""
    with join_workers(config.device, _LONGEST_WAIT) as (placement, world), TemporaryDirectory() as folder:
        components, _ = build_probed(config, placement, world, folder)
        with closing(components.loaders), limit_threads(threads_per_worker(world.size)):
            return median_step(torch.stack(all_gather(world, time_steps(components, world))))


def build_probed(config: Config, placement: Placement, world: World, folder: str) -> tuple[TrainComponents, str]:
    """The components of a training after the memory probe, and what it changed; the folder stays empty."""
    config = replace_settings(config, {"save_dir": folder, "resume": "never", "mirror": None})
    spec = prepare_spec(config, placement, world, FromConfig())
    components = build_components(spec, world, load_parts(spec, world))
    return components, "; ".join(fit_batch_sizes_to_memory(components))


def _measure_memory(components: TrainComponents, whole: MicroBatchProfile, half: MicroBatchProfile) -> Memory:
    """Weights and buffers, gradients, the optimizer's state after some steps, and what forward stores for backward."""
    model = components.state.model
    points = [(each.samples, float(each.activations)) for each in (half, whole)]
    fixed, slope = fit_line(*points) if points[0][0] != points[1][0] else (0.0, points[1][1] / points[1][0])
    return Memory(
        weights=sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]),
        gradients=sum(p.nbytes for p in components.strategy.local_parameters),
        optimizer=sum(value.nbytes for value in iterate_tensors(list(components.state.optimizer.state.values()))),
        fixed=fixed,
        per_sample=slope,
    )


class GroupTimer:
    """Counts the seconds that the groups of a sharded model take on a CPU, which runs nothing else meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        from multigpu_cli.strategies.fsdp.probe import list_groups  # late: torch's FSDP takes most of a second

        self.gathering = self.reducing = 0.0
        for group in list_groups([model]):
            group.unshard = self._count("gathering", group.unshard)
            group.wait_for_unshard = self._count("gathering", group.wait_for_unshard)
            group.post_backward = self._count("reducing", group.post_backward)

    def _count(self, kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = work(*arguments)
            setattr(self, kind, getattr(self, kind) + time.perf_counter() - began)
            return result

        return counted

    def read(self) -> tuple[float, float]:
        """Seconds of gathering and of reducing since the last call."""
        seconds, self.gathering, self.reducing = (self.gathering, self.reducing), 0.0, 0.0
        return seconds


_SECONDS, _WARM_UP = 3.0, 3
_WINDOW, _WINDOWS = 8, 9  # steps, and at most so many windows of them
_PHASES = 4


def median_step(times: Tensor) -> list[float]:
    """The mean times of a window of steps: of all windows, the one that takes the median time.

    `times` are the seconds of each phase, then of each message, [workers, steps, 4 + messages]. Workers that step
    together wait for the slowest of them, which waits least itself: its times are those of the step.
    """
    slowest = times[..., :_PHASES].sum(2).argmax(0)
    steps = times[slowest, torch.arange(len(slowest))]
    windows = steps[: len(steps) // _WINDOW * _WINDOW].unflatten(0, (-1, _WINDOW)).mean(1)
    seconds: list[float] = windows[windows.sum(1).median(0).indices].tolist()
    return seconds


def time_steps(components: TrainComponents, world: World | None = None, messages: Sequence[Tensor] = ()) -> Tensor:
    """Some seconds of steps after a warm-up: [steps, 4 + messages]; all workers of the world take the same number.

    A sharded model has two messages of its own: the gathering of its weights, and the reduction of their gradients.
    The number of windows is odd, so that one of them takes the median time.
    """
    rows = _steps(components, world.size if world else 1, messages)
    times = list(islice(rows, _WARM_UP))
    began = time.perf_counter()
    for window in range(1, _WINDOWS + 1):
        times += islice(rows, _WINDOW)
        spent = time.perf_counter() - began
        spent = all_reduce_max(world, [spent])[0] if world else spent
        if window % 2 and spent > _SECONDS:
            break
    return torch.tensor(times[_WARM_UP:], dtype=torch.float64)


class _PhaseTimer:
    """Records when the phases of a step end on the device, less what `groups` has counted in them."""

    def __init__(self, device: torch.device, groups: GroupTimer | None) -> None:
        self._wait = torch.get_device_module(device).synchronize
        self._marks: list[float] = []
        self._groups = groups

    def mark(self) -> None:
        self._wait()
        counted = self._groups.gathering + self._groups.reducing if self._groups else 0.0
        self._marks.append(time.perf_counter() - counted)

    def phase(self, name: str, samples: Tensor) -> None:
        """Record the end of forward, which is where backward begins."""
        if name.endswith("backward"):
            self.mark()

    def backward_done(self, gradients: Callable[[], list[Tensor]]) -> None:
        self.mark()

    def read(self) -> list[float]:
        """Seconds between the marks since the last call."""
        marks, self._marks = self._marks, []
        return [later - earlier for earlier, later in pairwise(marks)]


def _steps(components: TrainComponents, workers: int, messages: Sequence[Tensor]) -> Iterator[list[float]]:
    """Take steps of one micro-batch each, as the training loop does, with a learning rate of zero.

    Where several workers share a step, the changes of the buffers are gathered. The messages are summed over the
    workers after backward. Yields seconds of a step: data, forward, backward, commit, then each message.
    """
    state, strategy = components.state, components.strategy
    groups = GroupTimer(state.model) if strategy.sharded else None
    timer = _PhaseTimer(components.world.device, groups)
    stream = iterate_micro_batches(components)
    set_rate(state.optimizer, 0.0)
    while True:
        timer.mark()
        batch = next(stream)
        timer.mark()
        strategy.begin_step(workers)
        if components.task.global_loss:
            rehearse_global_loss(components, batch, len(batch))
        forward_backward(components, batch, len(batch.sample_indices), last=True, observer=timer)
        for message in messages:
            dist.all_reduce(message)
            timer.mark()
        strategy.after_backward(batch.micro_batch_index)
        strategy.reduce_gradients(idle=False)
        _, skipped = state.precision.clip_and_step(state.optimizer, strategy.local_parameters, 1.0, strategy.total_norm)
        strategy.rollback_buffers(skipped)
        timer.mark()
        data, forward, backward, *sent, commit = timer.read()
        yield [data, forward, backward, commit, *sent, *(groups.read() if groups else ())]


def iterate_micro_batches(components: TrainComponents) -> Iterator[Batch]:
    """This rank's micro-batches, epoch after epoch."""
    epoch = 0
    while True:
        for _, work in components.loaders.train.epoch(components.plan.batches, epoch, 0, components.world.rank, 1):
            yield from work
        epoch += 1
