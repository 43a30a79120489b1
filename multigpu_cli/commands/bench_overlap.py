"""How much of the reduction backward hides, and what loading costs: two ways of a step in turns.

A timer around communication that overlaps with backward measures both at once, and without any reduction the replicas
would diverge. So every other optimizer step reduces all gradients at once after backward, where it can be timed. The
exposed time is that of an overlapped step less that of an explicit one without its reduction.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, islice

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import TensorDataset

from multigpu_cli.commands.plan.measure import build_probed, iterate_micro_batches, threads_per_worker
from multigpu_cli.config.resume_rules import replace_settings, without_setting
from multigpu_cli.config.schema import Config
from multigpu_cli.data.load import check_has_samples, open_data
from multigpu_cli.data.loader import Loader
from multigpu_cli.distributed.placement import Placement, count_cores, cuda_devices, usable_gpus
from multigpu_cli.distributed.process_group import join_workers
from multigpu_cli.distributed.world import all_gather
from multigpu_cli.faults.replica_check import check_replicas
from multigpu_cli.launch import run_in_workers
from multigpu_cli.planning.batch import plan_batches
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.step import forward_backward
from multigpu_cli.runtime.seeding import limit_threads

_STEPS, _WARM_UP = 40, 6
_LONGEST_WAIT = 300.0  # seconds


@dataclass(frozen=True)
class Overlap:
    """The reduction of a step, in milliseconds, on the worker that waits least: others also wait for slower workers."""

    reduction: float  # of one explicit all-reduce of all gradients after backward
    exposed: float  # the part that overlap does not hide; may be negative within the noise


def measure_overlap(config: Config, workers: int) -> Overlap | None:
    """Measure in so many processes; None where gradients are not reduced by DDP's plain all-reduce."""
    wire, exact = config.communication, config.reproducibility.exact
    is_plain = wire.grad_compression == "none" and not wire.find_unused_parameters and not exact
    if workers == 1 or config.device.multi_gpu == "fsdp" or not is_plain:
        return None
    devices = cuda_devices(usable_gpus(config.device)[:workers]) or (torch.device("cpu"),) * workers
    return run_in_workers(Placement("ddp", devices, workers, "bench"), _run_worker, config)[0]


def median_overlap(repetitions: list[Overlap | None]) -> Overlap | None:
    """The medians over several measurements; None without any."""
    pairs = [(each.reduction, each.exposed) for each in repetitions if each]
    return Overlap(*map(statistics.median, zip(*pairs, strict=True))) if pairs else None


def _run_worker(config: Config) -> Overlap:
    """The work of one process."""
    own = replace_settings(without_setting(config, "gpu_ids"), {"multi_gpu": "ddp", "nproc_per_node": None})
    with join_workers(own.device, _LONGEST_WAIT) as (placement, world), tempfile.TemporaryDirectory() as folder:
        components, _ = build_probed(own, placement, world, folder)
        with closing(components.loaders.train), limit_threads(threads_per_worker(world.size)):
            seconds = compare_reductions(components, _STEPS)
        check_replicas(components.state.model, world, _STEPS)
        all_ranks = torch.stack(all_gather(world, torch.tensor(seconds, dtype=torch.float64, device=world.device)))
        return Overlap(*(1e3 * each for each in all_ranks.amin(0).tolist()))


def compare_reductions(components: TrainComponents, steps: int) -> tuple[float, float]:
    """Median seconds of the explicit reduction, and of its exposed part; odd steps are explicit ones."""
    wait = torch.get_device_module(components.world.device).synchronize
    stream, state, strategy = iterate_micro_batches(components), components.state, components.strategy
    overlapped: list[float] = []
    without_reduction: list[float] = []
    reductions: list[float] = []
    for number in range(steps + _WARM_UP):
        explicit, batch = number % 2 == 1, next(stream)
        components.set_learning_rates(min(number, components.plan.schedule.total_steps - 1))
        dist.barrier()
        wait()
        began = time.perf_counter()
        strategy.begin_step(components.world.size)
        forward_backward(components, batch, len(batch.sample_indices) * components.world.size, last=not explicit)
        wait()
        reduced = _reduce_gradients(components, wait) if explicit else (0.0, 0.0)
        ended = time.perf_counter()
        strategy.after_backward(components.world.rank)
        strategy.reduce_gradients(idle=False)
        _, skipped = state.precision.clip_and_step(state.optimizer, strategy.local_parameters, 1.0, strategy.total_norm)
        strategy.rollback_buffers(skipped)
        if number >= _WARM_UP:
            (without_reduction if explicit else overlapped).append(ended - began - reduced[0])
            reductions += [reduced[1]] if explicit else []
    return statistics.median(reductions), statistics.median(overlapped) - statistics.median(without_reduction)


def _reduce_gradients(components: TrainComponents, wait: Callable[[], None]) -> tuple[float, float]:
    """Average all gradients over the workers; seconds of the whole call, and of the all-reduce alone."""
    began = time.perf_counter()
    gradients = [p.grad for p in components.strategy.local_parameters if p.grad is not None]
    flat = _flatten_dense_tensors(gradients)
    wait()
    ready = time.perf_counter()
    dist.all_reduce(flat)
    wait()
    reduced = time.perf_counter() - ready
    flat /= components.world.size
    for gradient, mean in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(mean)
    wait()
    return time.perf_counter() - began, reduced


_SECONDS = 3.0  # of each pass at most
_ENOUGH = 0.95  # of the best rate


@dataclass(frozen=True)
class LoadingRates:
    """Samples a second by the number of loader processes, one figure a repetition; 0 alone for data in memory."""

    where: str
    rates: dict[int, list[float]]
    advice: str


def measure_loading(config: Config, repetitions: int) -> LoadingRates:
    """Fetch, prepare and augment batches as a training would, in turns with each number of processes."""
    check_has_samples(config, "bench --data-only")
    source = open_data(config)
    in_memory, cores = isinstance(source.train, TensorDataset), count_cores()
    processes = [0] if in_memory else sorted({0, cores, *(count for count in (1, 2, 4, 8) if count <= cores)})
    (device,) = cuda_devices(usable_gpus(config.device)[:1]) or (torch.device("cpu"),)
    size = 32 if config.batch.size == "auto" else int(config.batch.size)
    rates: dict[int, list[float]] = {number: [] for number in processes}
    for number in processes * repetitions:
        data = replace(config.data, num_workers=number)
        with closing(Loader(source.train, source, data, device=device, seed=config.reproducibility.seed)) as loader:
            rates[number].append(_measure_rate(loader, size))
    return LoadingRates(loader.data_location, rates, _choose_advice(rates, in_memory=in_memory))


def _measure_rate(loader: Loader, size: int) -> float:
    """Samples per second after the first batch, which starts the processes; of two epochs where one has one batch."""
    plan = plan_batches(samples=loader.size, micro_batch=min(size, loader.size), workers=1)
    batches = (batch for epoch in count() for _, work in loader.epoch(plan, epoch, 0, 0, 1) for batch in work)
    synchronize = torch.get_device_module(loader.device).synchronize
    samples, began, last = 0, 0.0, 0.0
    for batch in islice(batches, max(2, plan.steps_per_epoch)):
        synchronize()
        last = time.perf_counter()
        samples += len(batch.sample_indices) if began else 0
        began = began or last
        if last - began > _SECONDS:
            break
    return samples / (last - began)


def _choose_advice(rates: dict[int, list[float]], *, in_memory: bool) -> str:
    if in_memory:
        return "the data is in memory and indexed by whole batches: --num-workers has no effect"
    typical = {count: statistics.median(each) for count, each in rates.items()}
    best = max(typical.values())
    enough = min(count for count, rate in typical.items() if rate >= _ENOUGH * best)
    return f"--num-workers {enough}: {typical[enough]:,.0f} samples/s; more processes add less than 5 %"


def format_loading(loading: LoadingRates) -> Iterator[str]:
    """The rates and the advice."""
    yield f"loading alone: {loading.where}"
    for number, each in loading.rates.items():
        spread = f"({min(each):,.0f} to {max(each):,.0f})"
        yield f"{number:>4} loader process(es)  {statistics.median(each):>10,.0f} samples/s {spread}"
    yield loading.advice
