"""How much of the reduction backward hides: DDP's overlapped one against a single explicit one, in turns.

A timer around communication that overlaps with backward measures both at once, and leaving the reduction out would let
the replicas drift apart. So every other optimizer step reduces all gradients at once after backward, in a time that can
be measured; what an overlapped step takes beyond an explicit one without that time is what nothing hides.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from multigpu_cli.commands.plan.measure import build_rehearsed, iterate_micro_batches, limit_threads, threads_per_worker
from multigpu_cli.config.resume_rules import replace_settings, without_setting
from multigpu_cli.config.schema import Config
from multigpu_cli.faults.replica_check import check_replicas
from multigpu_cli.launch import run_in_workers
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.forward_backward import forward_backward
from multigpu_cli.runtime.collectives import all_gather
from multigpu_cli.runtime.device_placement import (
    Placement,
    choose_placement,
    count_cores,
    count_visible_gpus,
    cuda_devices,
    usable_gpus,
)
from multigpu_cli.runtime.launch_env import LaunchEnv
from multigpu_cli.runtime.process_group import process_group

_STEPS, _WARM_UP = 40, 6
_LONGEST_WAIT = 300.0  # seconds


@dataclass(frozen=True)
class Overlap:
    """The reduction of one step, in milliseconds; of the worker that waits least, the others wait for slower ones.

    Attributes:
        reduction: of one explicit all-reduce of all gradients after backward.
        exposed: what overlap leaves of it; below zero within the noise.
    """

    reduction: float
    exposed: float


def measure_overlap(config: Config, workers: int) -> Overlap | None:
    """Measure it in so many processes; None where gradients do not travel as DDP's plain all-reduce."""
    wire = config.communication
    if workers == 1 or config.reproducibility.exact or wire.grad_compression != "none" or wire.find_unused_parameters:
        return None
    devices = cuda_devices(usable_gpus(config.device)[:workers]) or (torch.device("cpu"),) * workers
    return Overlap(*run_in_workers(Placement("ddp", devices, workers, "bench"), _run_worker, config)[0])


def median_overlap(seen: list[Overlap | None]) -> Overlap | None:
    """The medians of several measurements of the same."""
    measured = [each for each in seen if each]
    if not measured:
        return None
    return Overlap(
        statistics.median(each.reduction for each in measured), statistics.median(each.exposed for each in measured)
    )


def _run_worker(config: Config) -> tuple[float, float]:
    """Be one of the processes: milliseconds of the reduction, and of what overlap leaves.

    Raises:
        TrainingError: as a training would, or the replicas have drifted apart.
    """
    launch_env = LaunchEnv.current()
    own = replace_settings(without_setting(config, "gpu_ids"), {"multi_gpu": "ddp", "nproc_per_node": None})
    placement = choose_placement(own.device, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=launch_env)
    device = placement.devices[0]
    with process_group(launch_env, device, timeout=_LONGEST_WAIT) as world, tempfile.TemporaryDirectory() as folder:
        components, _ = build_rehearsed(own, placement, world, folder)
        with closing(components.loaders.train), limit_threads(threads_per_worker(world.size)):
            seconds = compare_reductions(components, _STEPS)
        check_replicas(components.state.model, world, _STEPS)
        all_ranks = torch.stack(all_gather(world, torch.tensor(seconds, dtype=torch.float64, device=device)))
        reduction, exposed = (1e3 * each for each in all_ranks.amin(0).tolist())
        return reduction, exposed


def compare_reductions(components: TrainComponents, steps: int) -> tuple[float, float]:
    """Seconds of the explicit reduction, and of what overlap leaves; the odd steps are the explicit ones."""
    device = components.world.device
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    stream = iterate_micro_batches(components)
    overlapped: list[float] = []
    apart: list[float] = []
    reductions: list[float] = []
    for number in range(steps + _WARM_UP):
        explicit, batch = number % 2 == 1, next(stream)
        components.set_learning_rates(min(number, components.plan.schedule.total_steps - 1))
        dist.barrier()
        wait()
        began = time.perf_counter()
        components.strategy.begin_step(components.world.size)
        forward_backward(components, batch, len(batch.sample_indices) * components.world.size, last=not explicit)
        wait()
        reduced = _reduce_gradients(components, wait) if explicit else (0.0, 0.0)
        ended = time.perf_counter()
        components.strategy.after_backward(components.world.rank)
        components.strategy.reduce_gradients(idle=False)
        _, skipped = components.state.precision.clip_and_step(
            components.state.optimizer, components.trainable_parameters, 1.0
        )
        components.strategy.rollback_buffers(skipped)
        if number >= _WARM_UP:
            (apart if explicit else overlapped).append(ended - began - reduced[0])
            reductions += [reduced[1]] if explicit else []
    return statistics.median(reductions), statistics.median(overlapped) - statistics.median(apart)


def _reduce_gradients(components: TrainComponents, wait: Callable[[], None]) -> tuple[float, float]:
    """Average all gradients over the workers; the seconds of it all, and of the all-reduce alone."""
    began = time.perf_counter()
    gradients = [p.grad for p in components.trainable_parameters if p.grad is not None]
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
