"""Counters and timers of a run, for which no step waits; its noise scale; its trace of samples.

The noise scale says up to which size a global batch pays, from gradient norms of small and large batches. Source:
McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1. With G the true
gradient and Σ the covariance of single samples' gradients, E|G_B|² = |G|² + tr(Σ)/B. Two batch sizes give both
unknowns, and B_simple = tr(Σ)/|G|² is the batch size at which noise and signal are equal.
"""

import json
import math
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multigpu_cli.distributed.world import World, all_gather
from multigpu_cli.monitor.journal import AppendFile, Warn

_MOST = 512  # pairs of CUDA events between two readings; if there were more, the sum is extrapolated from these


class Stopwatch:
    """Sums many short waits.

    On the CPU the host's clock is used. A GPU works asynchronously, so the host's clock would also count time in which
    the host waits for the GPU (a full queue, a blocking copy); CUDA events in its queue mark begin and end instead.
    """

    def __init__(self, *, of_gpu: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._now: Callable[[], Any] = _record_event if of_gpu else clock
        self._of_gpu = of_gpu
        self._began: Any = None
        self._forget()

    def _forget(self) -> None:
        self._seconds, self._count = 0.0, 0
        self._pairs: deque[tuple[Any, Any]] = deque(maxlen=_MOST)

    def __enter__(self) -> None:
        """Begin a wait; one that has begun already is restarted."""
        self._began = self._now()

    def __exit__(self, *_: object) -> None:
        now = self._now()
        self._count += 1
        if self._of_gpu:
            self._pairs.append((self._began, now))
        else:
            self._seconds += now - self._began

    def read(self) -> tuple[float, int]:
        """Seconds and number of all waits since the last call; waits for the device."""
        seconds, count = self._seconds, self._count
        if self._pairs:
            self._pairs[-1][1].synchronize()
            milliseconds = sum(began.elapsed_time(ended) for began, ended in self._pairs)
            seconds = milliseconds / 1e3 * count / len(self._pairs)
        self._forget()
        return seconds, count


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Quantiles:
    """Quantiles of any number of positive values in bounded memory, each within 0.5 % of the true one.

    Values are counted in buckets whose bounds grow by 1 % (C. Masson, J. Rim and H. Lee, "DDSketch", VLDB 2019):
    about 2,300 of them span a microsecond to three hours.
    """

    _GROWTH = math.log(1.01)

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0

    def add(self, value: float, times: int = 1) -> None:
        self._buckets[math.ceil(math.log(max(value, 1e-9)) / self._GROWTH)] += times
        self.count += times

    def quantile(self, share: float) -> float:
        """The value that `share` (0…1) of all values do not exceed (nearest rank); NaN where there are none."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return math.exp((bucket - 0.5) * self._GROWTH)
        return math.nan


class StepTimer:
    """Steps, samples and seconds of training: over the run, and over the window since the last `read`.

    If the `device_runs_ahead`, the host only queues work (CUDA), so single steps cannot be timed without making it
    wait; each step then counts with the mean of its window, `data_wait` is the device's, and `read` is for a moment at
    which the device is done.
    """

    def __init__(
        self,
        *,
        device_runs_ahead: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._cpu, self._runs_ahead = clock, cpu, device_runs_ahead
        self._times = Quantiles()
        self.steps, self.samples = 0, 0
        self.start()

    def start(self) -> None:
        """Start the clock of the first step; without effect after a step."""
        if not self.steps:
            self._last, self.seconds = self._clock(), 0.0
            self._step_so_far = 0.0  # of a step that a pause or a read interrupts
            self.data_wait = Stopwatch(of_gpu=self._runs_ahead, clock=self._clock)
            self._window = _Window(self._cpu())

    def step(self, samples: int) -> None:
        """Count one optimizer step of all workers together, on so many samples."""
        elapsed = self._elapsed()
        if not self._runs_ahead:
            self._times.add(elapsed + self._step_so_far)
        self._step_so_far = 0.0
        self._window.steps += 1
        self._window.samples += samples
        self.steps += 1
        self.samples += samples

    @property
    def steps_so_far(self) -> int:
        """Steps since the last `read`."""
        return self._window.steps

    def cpu_seconds(self) -> float:
        """CPU seconds of all threads of this process since the last `read`; loader processes have their own."""
        return self._cpu() - self._window.cpu

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside (evaluation, checkpoints) is no training time."""
        self._step_so_far += self._elapsed()
        began = self._cpu()
        try:
            yield
        finally:
            self._last = self._clock()
            self._window.cpu += self._cpu() - began

    def read(self) -> dict[str, float]:
        """`samples_per_second` and `step_ms` since the last read; a new window begins."""
        self._step_so_far += self._elapsed()
        window, self._window = self._window, _Window(self._cpu())
        if self._runs_ahead and window.steps:
            self._times.add(window.seconds / window.steps, window.steps)
        return {
            "samples_per_second": divide(window.samples, window.seconds),
            "step_ms": 1e3 * divide(window.seconds, window.steps),
        }

    @property
    def samples_per_second(self) -> float:
        """Over the run, pauses left out."""
        return divide(self.samples, self.seconds)

    def step_ms(self) -> dict[str, float]:
        """Median and 95th percentile of the milliseconds a step took, over the run."""
        return {"p50": 1e3 * self._times.quantile(0.5), "p95": 1e3 * self._times.quantile(0.95)}

    def _elapsed(self) -> float:
        now = self._clock()
        elapsed, self._last = now - self._last, now
        self.seconds += elapsed
        self._window.seconds += elapsed
        return elapsed


class _Window:
    """The counts since the last read."""

    def __init__(self, cpu: float) -> None:
        self.cpu = cpu
        self.steps, self.samples, self.seconds = 0, 0, 0.0


def divide(part: float, whole: float) -> float:
    """The share, or rate, 0 of nothing."""
    return part / whole if whole else 0.0


def add_exactly(values: list[float]) -> float:
    """The sum without rounding; NaN where infinities of both signs meet."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


_REMEMBERED = 200  # estimates


class NoiseScale(NamedTuple):
    """B_simple in samples, with its standard error."""

    value: float
    spread: float


class Norms(NamedTuple):
    """|gradient|² of a small and of a large batch, each a mean over its samples or tokens, and their samples."""

    small: float
    large: float
    small_batch: int
    large_batch: int

    def signal_and_noise(self) -> tuple[float, float]:
        """Unbiased estimates of |G|² and tr(Σ); a single pair may well give negative ones."""
        b, B = self.small_batch, self.large_batch
        return (B * self.large - b * self.small) / (B - b), (self.small - self.large) / (1 / b - 1 / B)


class NoiseMeter:
    """Measures the first micro-batch's gradient in each logged step of several micro-batches; interval 0: never.

    The factor is what a micro-batch's loss was multiplied by, apart from the divisor of all losses of a step.
    """

    def __init__(self, interval: int, factor: float = 1.0) -> None:
        self._interval, self._factor = interval, factor
        self._norm: Tensor | None = None
        self._estimates: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def is_due(self, step: int, passes: int, done: int) -> bool:
        """Whether micro-batch `done` of this worker's `passes` in step `step` (counted from 1) is to be measured."""
        return bool(self._interval) and done == 1 and passes > 1 and step % self._interval == 0

    @torch.no_grad()
    def record_gradient(self, gradients: list[Tensor]) -> None:
        """Store the norm of the first micro-batch's gradient; without one the step is not measured."""
        self._norm = torch.nn.utils.get_total_norm(gradients) if gradients else None

    def take_small_norm(self) -> float | None:
        """The norm stored since the last call, without the factor of the losses."""
        norm, self._norm = self._norm, None
        return None if norm is None else float(norm) / self._factor

    def add(self, norms: Norms) -> None:
        """Add the norms of a step; on all ranks, whichever has measured."""
        if math.isfinite(norms.small) and math.isfinite(norms.large):
            self._estimates.append(norms.signal_and_noise())

    def value(self) -> NoiseScale | None:
        """The ratio of the mean estimates; None with too few of them, or where the noise hides the signal."""
        return ratio(list(self._estimates))


def ratio(estimates: list[tuple[float, float]]) -> NoiseScale | None:
    """tr(Σ)/|G|² (at least 0) with its standard error, by linear propagation from the scatter of the estimates."""
    count = len(estimates)
    if count < 5:
        return None
    signal = sum(each[0] for each in estimates) / count
    noise = sum(each[1] for each in estimates) / count
    if signal <= 0:
        return None
    value = max(0.0, noise) / signal
    scatter = sum((tr - value * g) ** 2 for g, tr in estimates) / (count - 1)
    return NoiseScale(value, math.sqrt(scatter / count) / signal)


_NONE = -1


class SampleTrace:
    """samples.jsonl: rank 0 writes {"step", "samples": [indices]} of each step, at most so many of a worker."""

    def __init__(self, path: Path, world: World, most: int, warn: Warn = warnings.warn) -> None:
        self._world, self._most = world, most
        self._lines = AppendFile(path, warn) if world.is_main else None

    def write(self, step: int, fetched: list[Tensor]) -> None:
        """Add one step; every rank calls it, with the (n,) int64 indices of its batches."""
        mine = torch.full((self._most,), _NONE, dtype=torch.int64, device=self._world.device)
        if fetched:
            indices = torch.cat(fetched)
            mine[: len(indices)] = indices.to(mine.device)
        everyone = torch.cat(all_gather(self._world, mine))
        if self._lines:
            samples = [index for index in everyone.tolist() if index != _NONE]
            self._lines.add(json.dumps({"step": step, "samples": samples}))

    def close(self) -> None:
        if self._lines:
            self._lines.close()
