"""`MetricsCollector` and `PerformanceMonitor`: measurements of a training loop of the user's own."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from multigpu_cli.api.gpu_info import gpu_utilisation, peak_memory_gb
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.meters import StepTimer


@dataclass
class MetricsCollector:
    """Measurements of a run, updated by each `record`.

    Attributes:
        training_time: seconds of training so far, without evaluation and checkpoints.
        throughput: samples per second over the whole time, of all GPUs together.
        memory_usage: GiB, the most that torch held on any GPU; 0.0 without one.
        gpu_utilization: per cent, by GPU, as NVML says; {} without it.
        loss_history: the losses.
    """

    training_time: float = 0.0
    throughput: float = 0.0
    memory_usage: float = 0.0
    gpu_utilization: dict[str, float | None] = field(default_factory=dict)
    loss_history: list[float] = field(default_factory=list)

    def record(self, loss: Tensor | float, meters: StepTimer) -> None:
        """Record the present values; reading a loss on a device waits for it."""
        self.loss_history.append(float(loss))
        self.training_time, self.throughput = meters.seconds, meters.samples_per_second
        self.memory_usage, self.gpu_utilization = peak_memory_gb(), gpu_utilisation()

    def as_dict(self) -> dict[str, Any]:
        """By the names of the attributes."""
        return dict(vars(self))


class PerformanceMonitor:
    """Measured throughput, memory and loss of a training loop, step by step."""

    def __init__(self) -> None:
        self._began: float | None = None
        self.times: list[float] = []
        self.losses: list[float] = []
        self.samples: list[int] = []
        self.memory: list[float] = []

    def start_monitoring(self) -> None:
        """Start the clock; earlier records are forgotten."""
        self.__init__()  # type: ignore[misc]
        self._began = time.perf_counter()

    def record_metrics(self, loss: Tensor | float, batch_size: int, num_gpus: int = 1) -> None:
        """Record one step.

        Args:
            loss: (); reading it waits for the device.
            batch_size: samples on each GPU.

        Raises:
            RequestError: before `start_monitoring`.
        """
        if self._began is None:
            raise RequestError("record_metrics: monitoring has not been started", remedy="start_monitoring()")
        self.losses.append(float(loss))
        self.times.append(time.perf_counter() - self._began)
        self.samples.append(batch_size * num_gpus)
        self.memory.append(peak_memory_gb())

    def get_summary(self) -> dict[str, float]:
        """steps, total_time (seconds), avg_throughput (samples/s), max_memory_usage (GiB), final_loss, avg_loss.

        Raises:
            RequestError: nothing was recorded.
        """
        if not self.times:
            raise RequestError("get_summary: nothing was recorded", remedy="record_metrics after each step")
        return {
            "steps": len(self.times),
            "total_time": self.times[-1],
            "avg_throughput": sum(self.samples) / self.times[-1],
            "max_memory_usage": max(self.memory),
            "final_loss": self.losses[-1],
            "avg_loss": sum(self.losses) / len(self.losses),
        }

    def plot_metrics(self, path: str | Path = "training_metrics.png") -> Path:
        """Plot loss, samples per second and memory over the steps into a file (PNG, SVG or PDF by its suffix).

        Raises:
            RequestError: nothing was recorded.
        """
        self.get_summary()
        from matplotlib.figure import Figure  # late: a second of loading

        ends = [0.0, *self.times]
        rates = [n / max(1e-9, end - start) for n, start, end in zip(self.samples, ends, self.times, strict=False)]
        columns = (("loss", self.losses), ("samples/s", rates), ("memory (GiB)", self.memory))
        figure = Figure(figsize=(8, 7), layout="constrained")
        for axes, (name, values) in zip(figure.subplots(3, 1, sharex=True), columns, strict=True):
            axes.plot(range(1, len(values) + 1), values)
            axes.set_ylabel(name)
        axes.set_xlabel("step")
        figure.savefig(path)
        return Path(path)
