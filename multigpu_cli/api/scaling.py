"""Functions of the API about the number of GPUs: batch size, launching a process per GPU, speed-up forecast."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from multigpu_cli.api.settings import TrainingMode
from multigpu_cli.config.schema import DeviceConfig
from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.launch import run_in_workers
from multigpu_cli.monitor.console import Console
from multigpu_cli.planning.speedup import ASSUMED, Interconnect, StepTimes, buckets, forecast
from multigpu_cli.runtime.choose_strategy_and_devices import choose_placement, count_cores, count_visible_gpus
from multigpu_cli.runtime.launch_env import refuse_srun_copies


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
    network = Interconnect(ASSUMED[wire])
    rows = forecast(
        counts,
        [work] * len(counts),
        network,
        micro_batch=batch_size,
        global_batch=None,
        samples=samples,
        epochs=1.0,
        price=price,
    )
    return [asdict(row) for row in rows]


def print_training_speedup_estimates(num_gpus: int | Sequence[int] = (1, 2, 4, 8), **measured: Any) -> None:
    """Print the forecast of `estimate_training_speedup` as a table; the arguments are the same."""
    console = Console("normal")
    rows = estimate_training_speedup(num_gpus, **measured)
    console.note(f"{'GPUs':>4}{'samples/s':>14}{'speedup':>9}{'efficiency':>12}{'hours':>10}  (forecast, not measured)")
    for row in rows:
        numbers = f"{row['speedup']:>9.2f}{row['efficiency']:>11.0%} {row['seconds'] / 3600:>9.2f}"
        console.note(f"{row['workers']:>4}{row['samples_per_second']:>14,.0f}{numbers}")
