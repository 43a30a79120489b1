"""What a plan rests on: the times and the memory of one worker, measured with the user's own model and data."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.data.loader import Batch
from multigpu_cli.launch import run_in_workers
from multigpu_cli.optimizers import set_rate
from multigpu_cli.planning.memory import Memory, fit_line
from multigpu_cli.planning.speedup import Link, StepTimes, buckets
from multigpu_cli.run.batch_size_finder import fit_batch_sizes_to_memory
from multigpu_cli.run.build import build_components
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.forward_backward import forward_backward
from multigpu_cli.run.micro_batch_profile import MicroBatchProfile, profile_micro_batch
from multigpu_cli.run.resolve_spec import resolve_spec
from multigpu_cli.runtime.collectives import all_gather, all_reduce_max
from multigpu_cli.runtime.device_placement import Placement, choose_placement, count_cores, count_visible_gpus
from multigpu_cli.runtime.launch_env import LaunchEnv
from multigpu_cli.runtime.process_group import process_group
from multigpu_cli.runtime.world import World
from multigpu_cli.strategies.buckets import measure_cap
from multigpu_cli.tasks.open_data import check_has_samples

_SECONDS, _WARM_UP = 3.0, 3
_WINDOW, _WINDOWS = 8, 9  # steps, and at most so many of them
_PHASES = 4
_LONGEST_WAIT = 300.0  # seconds


@dataclass(frozen=True)
class SingleWorkerProfile:
    """One worker, measured.

    Attributes:
        works: the times of one of so many workers. On a CPU that many were at work at once, as far as there are cores:
            they share its memory and its clock. On GPUs one stands for all.
        wire: between those of a CPU, from their steps; None where no several of them were at work.
        flops_per_sample: forward and backward.
        note: what the rehearsal changed.
    """

    components: TrainComponents
    works: dict[int, StepTimes]
    wire: Link | None
    memory: Memory
    flops_per_sample: float
    note: str


def threads_per_worker(workers: int) -> int:
    """CPU threads that each of so many workers has; a lone one keeps what the user set."""
    return min(torch.get_num_threads(), count_cores()) if workers == 1 else max(1, count_cores() // workers)


def measure_worker(config: Config, counts: list[int]) -> SingleWorkerProfile:
    """Build the model on one device and take some steps; nothing stays of them.

    Raises:
        RequestError, TrainingError: as a training would.
    """
    check_has_samples(config, "a forecast")
    alone = replace(config.device, multi_gpu="none", nproc_per_node=None)
    placement = choose_placement(alone, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=None)
    world = World(placement.devices[0])
    with tempfile.TemporaryDirectory(prefix="multigpu-plan-") as folder:
        own = replace_settings(config, {"multi_gpu": "none", "nproc_per_node": None})
        components, note = build_rehearsed(own, placement, world, folder)
        with closing(components.loaders.train):
            size = components.plan.batches.micro_batch
            whole, half = profile_micro_batch(components, size), profile_micro_batch(components, max(1, size // 2))
            if world.device.type == "cpu":
                works, wire = _measure_on_cores(components, config, counts)
            else:
                works, wire = dict.fromkeys(counts, _measure_alone(components)), None
            return SingleWorkerProfile(
                components, works, wire, _measure_memory(components, whole, half), whole.flops_per_sample, note
            )


def _measure_on_cores(
    components: TrainComponents, config: Config, counts: list[int]
) -> tuple[dict[int, StepTimes], Link | None]:
    """The times of one of so many CPU workers, and the wire between the most of them that have a core each.

    Beyond the cores: those of one that has a core to itself, and the wire between as many as there are.
    """
    works, wire = {}, None
    for workers in counts:
        if 1 < workers <= count_cores():
            works[workers], wire = _measure_together(config, workers)
        else:
            with limit_threads(threads_per_worker(workers)):
                works[workers] = _measure_alone(components)
    if wire is None and max(counts) > count_cores() > 1:
        _, wire = _measure_together(config, count_cores())
    return works, wire


def _measure_alone(components: TrainComponents) -> StepTimes:
    data, forward, backward, commit = median_step(_time_steps(components)[None])
    return StepTimes(data, forward, backward, commit, *_messages_of_step(components))


def _measure_together(config: Config, workers: int) -> tuple[StepTimes, Link]:
    """Several processes at once, which take their steps together.

    The wire is measured between these steps: it is slower there than in a loop that does nothing else (the caches are
    full of the step, and the threads that carry the bytes have to be woken).
    """
    placement = Placement("ddp", (torch.device("cpu"),) * workers, workers, "plan")
    messages, after, seconds = run_in_workers(placement, _run_worker, config)[0]
    data, forward, backward, commit, *sent = seconds
    points = list(zip(_message_sizes(messages, after), sent, strict=True))
    reduction = sum(sent if after else sent[:-1])  # training does not send those 8 bytes
    work = StepTimes(data, forward, backward, commit, messages, after, reduction)
    return work, Link.from_measurements("gloo, between steps", workers, points, overlaps=False)


def _message_sizes(messages: Sequence[float], after: float) -> list[float]:
    """Bytes of each message that one step sends: the gradient buckets, then what follows them, or 8 for the latency."""
    return [*messages, after or 8.0]


def _messages_of_step(components: TrainComponents, world: World | None = None) -> tuple[tuple[float, ...], float]:
    """Bytes of what a step sends: each message that is under way while backward goes on, and what follows it.

    --bucket-cap-mb auto is measured where there is a world to measure it in.
    """
    config, model = components.spec.config, components.state.model
    gradient = sum(p.nbytes for p in components.trainable_parameters)
    if config.reproducibility.exact:
        return (), float(gradient + sum(buffer.nbytes for buffer in model.buffers()))
    cap: Any = config.communication.bucket_cap_mb
    if cap == "auto":
        cap = measure_cap(model, world) if world else None
    share = 0.5 if config.communication.grad_compression in ("fp16", "bf16") else 1.0
    return tuple(share * size for size in buckets(gradient, cap)), 8.0 * sum(b.numel() for b in model.buffers())


def _run_worker(config: Config) -> tuple[tuple[float, ...], float, list[float]]:
    """Take steps together with the other workers: bytes of the messages, of what follows them, and the times."""
    cpu = torch.device("cpu")
    with (
        process_group(LaunchEnv.current(), cpu, timeout=_LONGEST_WAIT) as world,
        tempfile.TemporaryDirectory() as place,
    ):
        own = replace_settings(config, {"multi_gpu": "none", "nproc_per_node": None})
        alone = World(cpu, local_size=world.size)  # among as many that want loader processes
        components, _ = build_rehearsed(own, Placement("single", (cpu,), 0, "plan"), alone, place)
        with closing(components.loaders.train), limit_threads(threads_per_worker(world.size)):
            messages, after = _messages_of_step(components, world)
            tensors = [torch.zeros(ceil(size / 4)) for size in _message_sizes(messages, after)]
            times = torch.stack(all_gather(world, _time_steps(components, world, tensors)))
        return messages, after, median_step(times)


def build_rehearsed(config: Config, placement: Placement, world: World, folder: str) -> tuple[TrainComponents, str]:
    """What learns, rehearsed, and what the rehearsal changed; nothing is written into the folder."""
    spec = resolve_spec(replace_settings(config, {"save_dir": folder, "resume": "never"}), placement, world)
    components = build_components(spec, world)
    return components, "; ".join(fit_batch_sizes_to_memory(components))


@contextmanager
def limit_threads(wanted: int) -> Iterator[None]:
    """So many CPU threads as long as the context lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def median_step(times: Tensor) -> list[float]:
    """The mean times of some steps in a row, of those the ones that take the median time.

    Args:
        times: seconds of each phase, then of each message, [workers, steps, 4 + messages]. Workers that go in step
            wait for the slowest of them, and the one that waits least in a message tells how long it takes.
    """
    own, sent = times[..., :_PHASES], times[..., _PHASES:]
    slowest = own.sum(2).argmax(0)
    steps = torch.cat([own[slowest, torch.arange(len(slowest))], sent.amin(0)], 1)
    windows = steps[: len(steps) // _WINDOW * _WINDOW].unflatten(0, (-1, _WINDOW)).mean(1)
    seconds: list[float] = windows[windows.sum(1).median(0).indices].tolist()
    return seconds


def _time_steps(components: TrainComponents, world: World | None = None, messages: Sequence[Tensor] = ()) -> Tensor:
    """Some seconds of steps after a warm-up: [steps, 4 + messages]; all workers of the world take as many.

    An odd number of windows: one of them takes the median time.
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
    """Notes when the phases of a step end, and waits for the device to do so."""

    def __init__(self, device: torch.device) -> None:
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._marks: list[float] = []

    def mark(self) -> None:
        """A phase ends."""
        self._wait()
        self._marks.append(time.perf_counter())

    def phase(self, name: str, batch: Batch | None = None) -> None:
        """Forward ends where backward begins."""
        if name.endswith("backward"):
            self.mark()

    def backward_done(self, parameters: list[Tensor]) -> None:
        self.mark()

    def read(self) -> list[float]:
        """Seconds between the marks since the last call."""
        marks, self._marks = self._marks, []
        return [later - earlier for earlier, later in pairwise(marks)]


def _steps(components: TrainComponents, workers: int, messages: Sequence[Tensor]) -> Iterator[list[float]]:
    """Take steps of one micro-batch each, with what the loop does around them, at rate zero.

    Args:
        workers: that share a step; with several, the changes of the buffers are gathered.
        messages: summed over the workers after backward.

    Yields:
        seconds of a step: data, forward, backward, commit, then each message.
    """
    state, strategy, timer = components.state, components.strategy, _PhaseTimer(components.world.device)
    stream = iterate_micro_batches(components)
    set_rate(state.optimizer, 0.0)
    while True:
        timer.mark()
        batch = next(stream)
        timer.mark()
        strategy.begin_step(workers)
        forward_backward(components, batch, len(batch.sample_indices), last=True, observer=timer)
        for message in messages:
            dist.all_reduce(message)
            timer.mark()
        strategy.after_backward(batch.micro_batch_index)
        strategy.reduce_gradients(idle=False)
        _, skipped = state.precision.clip_and_step(state.optimizer, components.trainable_parameters, 1.0)
        strategy.rollback_buffers(skipped)
        timer.mark()
        data, forward, backward, *sent, commit = timer.read()
        yield [data, forward, backward, commit, *sent]


def iterate_micro_batches(components: TrainComponents) -> Iterator[Batch]:
    """Those of this rank, epoch after epoch."""
    epoch = 0
    while True:
        for _, work in components.loaders.train.epoch(components.plan.batches, epoch, 0, components.world.rank, 1):
            yield from work
        epoch += 1


def _measure_memory(components: TrainComponents, whole: MicroBatchProfile, half: MicroBatchProfile) -> Memory:
    """Weights and buffers, gradients, the optimizer's state as it is after some steps, and what forward keeps."""
    model = components.state.model
    states = [value for state in components.state.optimizer.state.values() for value in state.values()]
    points = [(each.samples, float(each.activations)) for each in (half, whole)]
    fixed, slope = fit_line(*points) if points[0][0] != points[1][0] else (0.0, points[1][1] / points[1][0])
    return Memory(
        weights=sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]),
        gradients=sum(p.nbytes for p in components.trainable_parameters),
        optimizer=sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
        fixed=fixed,
        per_sample=slope,
    )
