"""The `train` lines of the journal: metrics of all ranks, with one small collective per line; skipped steps."""

import math
import platform
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.distributed.world import all_gather
from multigpu_cli.errors import TrainingError, pluralize
from multigpu_cli.monitor.gpu import peak_flops
from multigpu_cli.monitor.meters import Norms, divide
from multigpu_cli.optimizers.build import base_rate
from multigpu_cli.run.assembly.components import StepResult
from multigpu_cli.run.checkpointing import finish_pending_checkpoint
from multigpu_cli.run.run import Run

_MOST_RANKS = 64  # of which each has its values in a line
_GPU_FIELDS = ("gpu_utilisation", "gpu_temperature", "gpu_power", "gpu_memory_used")


def log_step(run: Run, outcome: StepResult) -> None:
    """Write one `train` line; here the host waits for the device."""
    progress, observer = run.progress, run.observer
    observer.watchdog.set_position(progress.step, "logging")
    observer.loss.all_reduce_pending()
    rows = torch.stack(all_gather(run.world, measure_rank(run, peak_memory(run.world.device)))).tolist()
    steps, rates = observer.timer.steps_so_far, observer.timer.read()
    of_ranks = combine_ranks(rows, rates, steps)
    fields: dict[str, Any] = {
        "step": progress.step,
        "epoch": run.epoch,
        "samples": run.loaders.train.samples_seen_at(progress.step, run.plan.batches),
        "loss": observer.loss.last,
        "mean_loss": observer.loss.pop_mean_since_log(),
        "lr": base_rate(run.state.optimizer),
        **gradient_fields(run, rows, float(outcome.grad_norm)),
        "samples_per_second": rates["samples_per_second"],
        **run.loss_normalizer.rate(rates["samples_per_second"]),
        "step_ms": rates["step_ms"],
        **summarize_ranks(of_ranks),
        **device_fields(run, rates["samples_per_second"]),
        **run.task.log_fields(steps * rates["step_ms"] / 1e3),
    }
    run.log.console.train(run.log.journal.write("train", **fields))
    if unknown := describe_missing_gpu_metrics(run, of_ranks):
        run.log.console.note(unknown)
    if run.checkpointer.writer.is_done:
        finish_pending_checkpoint(run)
    report_skipped_steps(run)
    _warn_of_retries(run, of_ranks.get("allocator_retries", []))
    if run.compiled and (warning := run.compiled.take_warning()):
        run.log_fault("compile", warning)


def _warn_of_retries(run: Run, retries: Sequence[int]) -> None:
    """--exact: where memory is short, cuDNN takes a kernel that needs less of it, with other bits, and says nothing."""
    total, before = sum(retries), run.log.allocator_retries
    run.log.allocator_retries = total
    if run.config.reproducibility.exact and total > before:
        text = "a GPU's memory was nearly full: kernels may have been chosen that need less of it, with other bits"
        run.log_fault("exact", f"{text}; use a smaller --batch-size")


def measure_rank(run: Run, peak: int) -> Tensor:
    """(k,) float64 on this rank's device: memory, waits, gradient norm, CPU, tokens, and its GPU; NaN: unknown."""
    wait, small, timer = run.strategy.read_comm_wait(), run.observer.noise.take_small_norm(), run.observer.timer
    values = [
        float(peak),
        timer.data_wait.read()[0],
        math.nan if wait is None else wait,
        math.nan if small is None else small,
        timer.cpu_seconds() / run.plan.threads,
        *map(float, run.observer.take_tokens()),
    ]
    if run.world.device.type == "cuda":
        values.append(float(torch.cuda.memory_reserved(run.world.device)))
        values += run.log.gpu_monitor.read() if run.log.gpu_monitor else [math.nan] * len(_GPU_FIELDS)
        values.append(float(torch.cuda.memory_stats(run.world.device)["num_alloc_retries"]))
    return torch.tensor(values, dtype=torch.float64, device=run.world.device)


def gradient_fields(run: Run, rows: Sequence[Sequence[float]], norm: float) -> dict[str, Any]:
    """The norm of the global batch's gradient, and the noise scale so far."""
    small = [row[3] for row in rows if not math.isnan(row[3])]
    if small:
        run.observer.noise.add(_pair_norms(run, small, norm))
    noise = run.observer.noise.value()
    scale = {"noise_scale": noise.value, "noise_scale_spread": noise.spread} if noise else {}
    return {"grad_norm": norm} | scale


def _pair_norms(run: Run, small: Sequence[float], large: float) -> Norms:
    """The norms of the step just done, of first micro-batches and the global batch, as means over samples.

    A first micro-batch of several is never short. Its loss was divided by the expected units; it holds its real ones.
    """
    batches = run.plan.batches
    samples = batches.num_samples((run.progress.step - 1) % batches.steps_per_epoch)
    first = batches.micro_batch * run.strategy.replicas_per_process
    scale = run.loss_normalizer.divisor(samples) / (max(1, int(run.loss_normalizer.last)) * first / samples)
    return Norms(sum((scale * norm) ** 2 for norm in small) / len(small), large**2, first, samples)


def combine_ranks(rows: Sequence[Sequence[float]], rates: dict[str, float], steps: int) -> dict[str, Any]:
    """The fields of a `train` line, from each rank's `measure_rank`, and from rank 0's rates of so many steps.

    A step takes all workers equally long, so a worker's own time is the step's time less its wait for the others. The
    shortest wait of all is exposed communication; longer waits are due to stragglers.
    """
    peaks, data, waits, _, cpu, real, places, *more = zip(*rows, strict=True)
    seconds = rates["step_ms"] / 1e3
    fields: dict[str, Any] = {
        "data_wait_share": divide(sum(data) / len(data), steps * seconds),
        "data_wait_ms": [1e3 * divide(each, steps) for each in data],
        "comm_share": None,
        "memory": [int(peak) for peak in peaks],
        "cpu_utilisation": [100 * divide(each, steps * seconds) for each in cpu],
    }
    if not any(map(math.isnan, waits)):
        least, mean = min(waits), sum(waits) / len(waits)
        fields["comm_share"] = divide(least, seconds)
        fields["straggler_share"] = divide(mean - least, seconds)
        fields["own_ms"] = [1e3 * max(0.0, seconds - wait) for wait in waits]
    if sum(places):
        fields["all_tokens_per_second"] = divide(sum(real), steps * seconds)
        fields["padding_share"] = max(0.0, 1 - sum(real) / sum(places))
    for name, values in zip(("memory_reserved", *_GPU_FIELDS, "allocator_retries"), more, strict=False):
        fields[name] = [None if math.isnan(value) else value for value in values]
    return fields


def summarize_ranks(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Beyond 64 ranks `min`, `mean`, `max` and `worst_rank` in place of a list of values; None where none is known."""
    return {
        name: _summarize(name, value) if isinstance(value, list) and len(value) > _MOST_RANKS else value
        for name, value in fields.items()
    }


def _summarize(name: str, values: list[float | None]) -> dict[str, float] | None:
    known = [(value, rank) for rank, value in enumerate(values) if value is not None]
    if not known:
        return None
    least, greatest, mean = min(known), max(known), sum(value for value, _ in known) / len(known)
    worst = least if name.endswith("utilisation") else greatest
    return {"min": least[0], "mean": mean, "max": greatest[0], "worst_rank": worst[1]}


def describe_missing_gpu_metrics(run: Run, fields: Mapping[str, Any]) -> str:
    """The GPU metrics of a `train` line that NVML has stopped reporting since the last call, with ranks; "" if none."""
    unknown = {(name, rank) for name in _GPU_FIELDS for rank, value in enumerate(fields.get(name, ())) if value is None}
    new, run.log.unknown_gpu_fields = unknown - run.log.unknown_gpu_fields, run.log.unknown_gpu_fields | unknown
    if not new:
        return ""
    ranks = sorted({rank for _, rank in new})
    names = ", ".join(name for name in _GPU_FIELDS if name in dict(new))
    sampler = run.log.gpu_monitor
    why = f" ({sampler.missing})" if sampler and sampler.missing and run.world.rank in ranks else ""
    return f"{names} of the GPU of rank {', '.join(map(str, ranks))}: not known{why}, null in the journal"


def device_fields(run: Run, samples_per_second: float) -> dict[str, Any]:
    """Quantiles of the step time over the run so far, and model FLOPs utilization."""
    times = run.observer.timer.step_ms()
    fields = {"step_p50_ms": times["p50"], "step_p95_ms": times["p95"]}
    peak = peak_flops(run.plan.device, run.state.precision.name)
    if peak and run.log.flops_per_sample:
        fields["mfu"] = run.log.flops_per_sample * samples_per_second / (peak * run.plan.batches.workers)
    return fields


def compiler_fields(run: Run) -> dict[str, Any]:
    """The time and graph breaks of --compile, for the journal and the console; {} without it."""
    report = run.compiled.report() if run.compiled else {}
    if report:
        breaks = "; ".join(report["graph_breaks"]) or "none"
        run.log.console.note(f"compiled in {report['seconds']:.1f} s; graph breaks: {breaks}")
    return {"compile": report} if report else {}


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's allocator, or of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def log_recovery(run: Run) -> None:
    """After the first step of an attempt, journal how long the recovery took and how many steps were lost."""
    last, run.control.previous_attempt = run.control.previous_attempt, None
    if last is not None:
        lost = max(0, (last.step or 0) - (run.progress.step - 1))
        seconds = max(0.0, time.time() - last.last_progress_time)
        run.log.journal.write("recovery", step=run.progress.step, seconds=seconds, lost_steps=lost, cause=last.cause)
        run.log.console.note(f"recovered in {seconds:.1f} s, {pluralize(lost, 'step')} repeated")


def report_skipped_steps(run: Run) -> None:
    """Journal the steps that were skipped since the last call, and raise a TrainingError where they must not go on."""
    skipped = run.observer.nonfinite.read()
    if not skipped:
        return
    run.strategy.check_passes()
    samples = _list_samples(run, skipped[-1])
    last = f"last in step {skipped[-1] + 1}, of samples {_first_samples(samples)}"
    text = f"{pluralize(len(skipped), 'step')} skipped: the gradient was NaN or infinite, {last}"
    run.log_fault("nonfinite", text, samples=samples)
    try:
        run.observer.nonfinite.check_may_continue(skipped)
    except TrainingError as error:
        error.problem += f", of samples {_first_samples(samples)}"
        raise


def _list_samples(run: Run, step: int) -> list[int]:
    """The sample numbers of a step's global batch: the same on every rank, without communication."""
    batches = run.plan.batches
    epoch, in_epoch = divmod(step, batches.steps_per_epoch)
    order = run.loaders.train.sample_order(epoch)
    first = in_epoch * batches.global_batch
    return [int(number) for number in order[first : first + batches.num_samples(in_epoch)]]


def _first_samples(samples: list[int]) -> str:
    return ", ".join(map(str, samples[:8])) + (" …" if len(samples) > 8 else "")


def journal_start(run: Run, gpus: list[str]) -> None:
    """Write the journal's `start` line: plan, hosts, devices and versions; `gpus` are names of models."""
    run.log.journal.write(
        "start",
        plan=run.plan.as_dict(),
        world_size=run.world.size,
        host=platform.node(),
        hosts=list(dict.fromkeys(run.world.hosts)),
        devices=[str(device) for device in run.spec.placement.devices],
        gpus=gpus,
        data=run.loaders.train.data_location,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        resumed_from=run.spec.resume_point.checkpoint,
        **compiler_fields(run),
    )
