"""`MetricsCollector`, `PerformanceMonitor`, the GPUs of this machine, and estimates for a loop of the user's own."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multigpu_cli.api.settings import TrainingMode
from multigpu_cli.config.schema import DeviceConfig
from multigpu_cli.distributed.launch_env import refuse_srun_copies
from multigpu_cli.distributed.placement import choose_placement, count_cores, count_visible_gpus
from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.launch import run_in_workers
from multigpu_cli.monitor import gpu
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.meters import StepTimer
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.planning.speedup import ASSUMED, Interconnect, StepTimes, buckets, forecast


@dataclass
class MetricsCollector:
    """Measurements of a run, updated by each `record`.

    Attributes:
        training_time: seconds of training so far, without evaluation and checkpoints.
        throughput: samples per second over the whole time, of all GPUs together.
        memory_usage: GiB, the most that torch held on any GPU; 0.0 without one.
        gpu_utilization: per cent, by GPU, as NVML says; {} without it.
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
        """Record one step of `batch_size` samples on each GPU; reading the loss, (), waits for the device.

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


_GIB = 2**30


def get_gpu_info() -> dict[str, Any]:
    """The GPUs that this process may use.

    Returns:
        cuda_available, gpu_count, gpu_details (id, name, memory_gb, compute_capability, multi_processor_count, status
        of each), total_memory_gb (GiB), compute_capability (a list), nccl_available, status "success".
    """
    found = [torch.cuda.get_device_properties(number) for number in range(count_visible_gpus())]
    details: list[dict[str, Any]] = [
        {
            "id": number,
            "name": each.name,
            "memory_gb": round(each.total_memory / _GIB, 2),
            "compute_capability": f"{each.major}.{each.minor}",
            "multi_processor_count": each.multi_processor_count,
            "status": "healthy",
        }
        for number, each in enumerate(found)
    ]
    return {
        "cuda_available": bool(details),
        "gpu_count": len(details),
        "gpu_details": details,
        "total_memory_gb": round(sum(each["memory_gb"] for each in details), 2),
        "compute_capability": [each["compute_capability"] for each in details],
        "nccl_available": dist.is_available() and dist.is_nccl_available(),
        "status": "success",
    }


def print_gpu_info() -> None:
    """Print `get_gpu_info()` in one line per GPU."""
    found, console = get_gpu_info(), Console("normal")
    if not found["gpu_count"]:
        console.note("no GPU is visible: training runs on the CPU")
    for each in found["gpu_details"]:
        about = f"{each['memory_gb']:.1f} GiB, compute capability {each['compute_capability']}"
        console.note(f"GPU {each['id']}: {each['name']}, {about}, {each['multi_processor_count']} multiprocessors")


def gpu_utilisation() -> dict[str, float | None]:
    """Per cent of the last second in which some kernel ran, by GPU as NVML numbers them; {} without NVML."""
    try:
        nvml = gpu.open_nvml()
    except gpu.NoNvml:
        return {}
    return {f"gpu_{each.number}": each.load.utilisation for each in gpu.list_gpus(nvml)}


def peak_memory_gb() -> float:
    """GiB: the most that torch has held on any visible GPU since it started or was reset; 0.0 without one."""
    return max((torch.cuda.max_memory_allocated(i) / _GIB for i in range(count_visible_gpus())), default=0.0)


def clear_gpu_memory() -> None:
    """Release the memory that torch caches on the GPUs in use. Training does not need it."""
    gc.collect()
    torch.cuda.empty_cache()  # of all GPUs in use; selecting another one would allocate memory on it


def optimize_batch_size_for_multi_gpu(
    base_batch_size: int, gpu_count: int, strategy: str | TrainingMode = "auto"
) -> dict[str, Any]:
    """Compute the global batch of a batch size per GPU; to measure what fits into memory, use `batch_size="auto"`.

    Returns:
        base_batch_size, batch_per_gpu, effective_batch_size (samples per optimizer step), gpu_count, scaling_factor,
        strategy (single, dp, ddp or fsdp), learning_rate_factor: linear for SGD and sqrt for Adam's family.
    """
    if base_batch_size < 1 or gpu_count < 1:
        raise RequestError(f"base_batch_size={base_batch_size}, gpu_count={gpu_count}: at least 1 each")
    mode = TrainingMode.named(strategy)
    count = 1 if mode is TrainingMode.SINGLE_GPU else gpu_count
    name = "single" if count == 1 else "ddp" if mode is TrainingMode.AUTO else mode.value
    return {
        "base_batch_size": base_batch_size,
        "batch_per_gpu": base_batch_size,
        "effective_batch_size": base_batch_size * count,
        "gpu_count": count,
        "scaling_factor": count,
        "strategy": name,
        "learning_rate_factor": {"linear": float(count), "sqrt": count**0.5},
    }


def launch_distributed_training(
    function: Callable[..., Any], num_gpus: int | None = None, *arguments: Any, max_restarts: int = 0
) -> list[Any]:
    """Call a function in one process per GPU (on CPU: two), as torchrun does; returns the results in rank order.

    Args:
        function: defined at the top of a module. Unlike with mp.spawn it gets no rank: `train_with_multi_gpu` and the
            others read it from the environment.
        num_gpus: processes; None is one per GPU.
        arguments: of the function; they are pickled, so lambdas are not possible.

    Raises:
        RequestError: fewer GPUs than processes, or srun started several of this one.
        WorkersFailed: a call raised an exception.
    """
    refuse_srun_copies()
    wanted = DeviceConfig(multi_gpu="ddp", nproc_per_node=num_gpus)
    placement = choose_placement(wanted, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=None)
    answers = run_in_workers(placement, function, *arguments, max_restarts=max_restarts)
    return [answers[rank] for rank in sorted(answers)]


def estimate_training_speedup(
    num_gpus: int | Sequence[int] = (1, 2, 4, 8),
    *,
    parameters: int,
    forward_seconds: float,
    backward_seconds: float,
    batch_size: int,
    data_seconds: float = 0.0,
    commit_seconds: float = 0.0,
    samples: int = 1_000_000,
    wire: str = "nvlink4",
    price: float | None = None,
) -> list[dict[str, Any]]:
    """Forecast the speed on more GPUs from measured times of one GPU and a model of the link (planning.speedup).

    `multigpu plan` measures these times itself. No efficiency is assumed.

    Args:
        parameters: number of the model's, 4 bytes each.
        forward_seconds, backward_seconds, data_seconds: of one micro-batch; commit_seconds: of the optimizer's step.
        batch_size: per GPU; the global batch grows with the number of GPUs.
        samples: of the whole run.
        wire: the link between GPUs: pcie4, nvlink4, ethernet-25, ethernet-100 or infiniband-400.
        price: of one GPU's hour.

    Returns:
        one dict for one GPU, and one for each number of `num_gpus`: workers, global_batch, step (seconds), waiting
        (seconds), samples_per_second, speedup (over one), efficiency, steps, seconds, cost.

    Raises:
        RequestError: the wire is unknown, or a number is below 1.
    """
    if wire not in ASSUMED:
        raise RequestError(f"wire {wire!r}: unknown", remedy=did_you_mean(wire, ASSUMED))
    counts = sorted({1, *([num_gpus] if isinstance(num_gpus, int) else num_gpus)})
    if counts[0] < 1 or batch_size < 1:
        raise RequestError(f"num_gpus={num_gpus}, batch_size={batch_size}: at least 1 each")
    work = StepTimes(data_seconds, forward_seconds, backward_seconds, commit_seconds, buckets(4 * parameters))
    base = BatchPlan(samples=samples, micro_batch=batch_size, global_batch=batch_size, workers=1)
    network = Interconnect(ASSUMED[wire])
    rows = forecast(counts, [work] * len(counts), network, base, 1.0, grows=True, price=price)
    return [asdict(row) for row in rows]


def print_training_speedup_estimates(num_gpus: int | Sequence[int] = (1, 2, 4, 8), **measured: Any) -> None:
    """Print the forecast of `estimate_training_speedup` as a table, with the cost if a `price` is passed."""
    console = Console("normal")
    rows = estimate_training_speedup(num_gpus, **measured)
    cost = "" if rows[0]["cost"] is None else f"{'cost':>12}"
    heading = f"{'GPUs':>4}{'samples/s':>14}{'speedup':>9}{'efficiency':>12}{'hours':>10}{cost}"
    console.note(f"{heading}  (forecast, not measured)")
    for row in rows:
        numbers = f"{row['speedup']:>9.2f}{row['efficiency']:>11.0%} {row['seconds'] / 3600:>9.2f}"
        numbers += f"{row['cost']:>12,.2f}" if cost else ""
        console.note(f"{row['workers']:>4}{row['samples_per_second']:>14,.0f}{numbers}")
