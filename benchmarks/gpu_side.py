"""One side of one job of `benchmarks.gpu`, in a process of its own: a JSON object on stdout.

    python -m benchmarks.gpu_side gpt2 limit

Warm-up is outside of the rate on both sides. Ours is a run of the engine, by its own log lines; the limit is the plain
loop: bf16 autocast, channels_last, fused AdamW, cuDNN's choice of kernels and TF32 as in ours, no data path, nothing
watched. Behind the timed steps some more are looked at kernel by kernel, where torch's profiler sees the GPU.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile, supported_activities

from benchmarks.gpu_workloads import GOAL, Job, jobs
from multigpu_cli import engine
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.monitor import journal
from multigpu_cli.monitor.console import Console, ProgressDisplay
from multigpu_cli.run.open import resolve_request
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.run.train_log import peak_memory
from multigpu_cli.runtime.seeding import enable_fast_kernels

_NEVER = 1_000_000
_SHOWN = 100  # characters of a kernel's name


def measure_side(name: str, side: str, data: dict[str, str], *, tiny: bool) -> dict[str, Any]:
    """What this side of this job gives: value and unit, steps, memory, what the host and the kernels did."""
    job = jobs(tiny=tiny)[name]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if side == "limit":
        return _limit(job, device)
    return _ours(job, data, device) if job.build else _time_to_goal(job, data, device)


def _ours(job: Job, data: dict[str, str], device: torch.device) -> dict[str, Any]:
    warm_up, timed, traced = job.steps
    begin = warm_up + timed + 1  # a step later, so that the profiler's start is in no timed window
    length = {"epochs": _NEVER, "max_steps": begin + traced, "checkpoint_every": _NEVER, "log_interval": warm_up}
    kernels = Kernels(begin, begin + traced, range(warm_up, warm_up + timed))
    summary, events = _run(dict(job.flags) | data | length, job.sets, device, Watching(kernels))
    lines = [event for event in events if event["event"] == "train" and warm_up < event["step"] <= warm_up + timed]
    seconds = sum(line["step_ms"] for line in lines) / 1e3 * warm_up
    found = _row(job, warm_up * len(lines), seconds, summary["peak_memory_bytes"][0], kernels)
    return found | ({"mfu": lines[-1]["mfu"]} if "mfu" in lines[-1] else {})


def _time_to_goal(job: Job, data: dict[str, str], device: torch.device) -> dict[str, Any]:
    summary, events = _run(dict(job.flags) | data, (), device, Console("silent"), "fashion_mnist")
    began = next(event["time"] for event in events if event["event"] == "start")
    good = (event for event in events if event["event"] == "eval" and event["split"] == "val")
    reached = next((event["time"] for event in good if event["accuracy"] >= GOAL), None)
    value = {"value": None if reached is None else reached - began, "unit": "s"}
    return value | {"steps": summary["steps"], "peak_memory_bytes": summary["peak_memory_bytes"][0]}


def _run(
    flags: dict[str, Any], sets: Sequence[str], device: torch.device, console: Console, recipe: str | None = None
) -> tuple[dict[str, Any], list[journal.Event]]:
    """A run of the engine: its summary and its journal."""
    with tempfile.TemporaryDirectory() as folder:
        config = resolve({**{name: str(value) for name, value in flags.items()}, "save_dir": folder}, sets, recipe)
        choice = Placement("single", (device,), 0, "benchmark")
        opening = resolve_request(config, choice, None, console, lambda error: console.error(str(error)), FromConfig())
        with opening as request:
            summary = engine.run(request)
        return summary, list(journal.read_events(Path(folder, "journal.jsonl")))


def _limit(job: Job, device: torch.device) -> dict[str, Any]:
    step = _plain_step(job, device)
    enable_fast_kernels(device)
    warm_up, timed, traced = job.steps
    kernels = Kernels(0, traced)
    _repeat(step, warm_up, device)
    began = time.thread_time()
    seconds = _repeat(step, timed, device)
    kernels.host_seconds = (time.thread_time() - began) / timed
    peak = peak_memory(device)
    for number in range(traced + 1):
        kernels.at(number)
        step()
    return _row(job, timed, seconds, peak, kernels)


def _plain_step(job: Job, device: torch.device) -> Callable[[], None]:
    assert job.build
    model = job.build(job.shape, job.classes, **job.args).to(device)
    inputs, targets = (tensor.to(device) for tensor in job.batch())
    if inputs.ndim == 4:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not among nn.Module.to's overloads
        inputs = inputs.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def compute_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(inputs)
        return cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    mode = job.flags.get("compile", "off")
    loss = compute_loss if mode == "off" else torch.compile(compute_loss, mode=mode)  # as nanoGPT does

    def step() -> None:
        optimizer.zero_grad()
        loss(inputs, targets).backward()
        optimizer.step()

    return step


def _repeat(step: Callable[[], None], times: int, device: torch.device) -> float:
    """Seconds, from an idle device to an idle device."""
    began = time.perf_counter()
    for _ in range(times):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


class Kernels:
    """Traces steps `begin` to `end` of a loop kernel by kernel, and the host's work in other steps.

    Attributes:
        gaps: the share of the time in which the GPU ran no kernel. launches: kernels of a step.
        slowest: of the ten kernels that take longest name and µs of a step.
        host_seconds: of the CPU that this thread takes for a step; near a step's time, the GPU waits for it.
    """

    def __init__(self, begin: int, end: int, host: range = range(0)) -> None:
        seen = ProfilerActivity.CUDA in supported_activities()
        self._begin, self._end, self._host = begin, end, host
        self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True) if seen else None
        self.gaps: float | None = None
        self.launches: float | None = None
        self.slowest: list[tuple[str, float]] = []
        self.host_seconds: float | None = None

    def at(self, step: int) -> None:
        """So many steps are done."""
        if self._host and step == self._host.start:
            self._began = time.thread_time()
        if self._host and step == self._host.stop:
            self.host_seconds = (time.thread_time() - self._began) / len(self._host)
        if self._profile is None or step not in (self._begin, self._end):
            return
        torch.cuda.synchronize()
        if step == self._begin:
            self._profile.start()
        else:
            self._profile.stop()
            found = [event for event in self._profile.events() or () if event.device_type.name == "CUDA"]
            self.note([(event.name, event.time_range.start, event.time_range.end) for event in found])

    def note(self, kernels: Sequence[tuple[str, float, float]]) -> None:
        """Take down what ran: name, begin and end in µs."""
        steps, spent = self._end - self._begin, defaultdict[str, float](float)
        for name, begin, end in kernels:
            spent[name] += end - begin
        slowest = sorted(spent.items(), key=lambda kernel: -kernel[1])
        self.gaps, self.launches = idle_share(kernel[1:] for kernel in kernels), len(kernels) / steps
        self.slowest = [(name[:_SHOWN], round(micro / steps, 1)) for name, micro in slowest[:10]]


class Watching(Console):
    """Says nothing; its bar tells the kernels' watch of each step."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__("silent")
        self._kernels = kernels

    def progress(self, total_steps: int, initial: int = 0) -> ProgressDisplay:
        bar = ProgressDisplay(total_steps)
        bar.update = lambda step, fields=None: self._kernels.at(step)  # type: ignore[method-assign]
        return bar


def idle_share(busy: Any) -> float | None:
    """The share of the time from the first to the last of these (begin, end) that none of them covers; None of none."""
    intervals = sorted(busy)
    if not intervals:
        return None
    first, covered, until = intervals[0][0], 0.0, intervals[0][0]
    for begin, end in intervals:
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return 1 - covered / (until - first) if until > first else 0.0


def _row(job: Job, steps: int, seconds: float, peak: int, kernels: Kernels) -> dict[str, Any]:
    rate = steps * int(job.flags["batch_size"]) / seconds
    found = {"value": rate, "unit": "samples/s", "steps": steps, "seconds": seconds, "peak_memory_bytes": peak}
    if torch.cuda.is_available():
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["allocator_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    found |= {"kernel_gaps": kernels.gaps, "launches": kernels.launches, "slowest_kernels": kernels.slowest}
    return found | {"host_seconds": kernels.host_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job")
    parser.add_argument("side", choices=["ours", "limit"])
    parser.add_argument("--data-dir")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    data = {"data_dir": asked.data_dir} if asked.data_dir else {}
    print(json.dumps(measure_side(asked.job, asked.side, data, tiny=asked.tiny)))
    sys.stdout.flush()
    os._exit(0)  # past torch's exit, where gloo now and then aborts a process that is done


if __name__ == "__main__":
    main()
