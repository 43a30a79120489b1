"""The functions of the API as methods of one object that remembers: strategy, and the metrics that were logged."""

from collections import defaultdict
from functools import cache, wraps
from typing import Any

from torch import nn

from multigpu_cli.api import gpu_info, scaling, training, wrap
from multigpu_cli.api.settings import TrainingMode
from multigpu_cli.runtime.world import LaunchEnv


class Functions:
    """What MultiGPUTrainer() offers beside a run of its own.

    Attributes:
        current_strategy: DataParallel or DistributedDataParallel, once a setup has wrapped a model; else None.
        training_metrics: what was logged, by "epoch_N".
    """

    get_gpu_info = staticmethod(gpu_info.get_gpu_info)
    print_gpu_info = staticmethod(gpu_info.print_gpu_info)
    clear_gpu_memory = staticmethod(gpu_info.clear_gpu_memory)
    train_with_multi_gpu = staticmethod(training.train_with_multi_gpu)
    evaluate_with_multi_gpu = staticmethod(training.evaluate_with_multi_gpu)
    optimize_batch_size_for_multi_gpu = staticmethod(scaling.optimize_batch_size_for_multi_gpu)
    launch_distributed_training = staticmethod(scaling.launch_distributed_training)
    estimate_training_speedup = staticmethod(scaling.estimate_training_speedup)
    print_training_speedup_estimates = staticmethod(scaling.print_training_speedup_estimates)

    def __init__(self) -> None:
        self.current_strategy: str | None = None
        self.training_metrics: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def setup_data_parallel(self, model: nn.Module, device_ids: list[int] | None = None) -> tuple[nn.Module, bool]:
        """As wrapping.setup_data_parallel."""
        return self._remember_strategy(*wrap.setup_data_parallel(model, device_ids))

    def setup_distributed_data_parallel(self, model: nn.Module, *args: Any, **named: Any) -> tuple[nn.Module, bool]:
        """As wrapping.setup_distributed_data_parallel."""
        return self._remember_strategy(*wrap.setup_distributed_data_parallel(model, *args, **named))

    def setup_multi_gpu_training(
        self, model: nn.Module, strategy: str | TrainingMode = "auto", *args: Any, **named: Any
    ) -> tuple[nn.Module, bool, dict[str, Any]]:
        """As wrapping.setup_multi_gpu_training."""
        model, ok, found = wrap.setup_multi_gpu_training(model, strategy, *args, **named)
        return (*self._remember_strategy(model, ok), found)

    def cleanup_distributed(self) -> None:
        """End this process's group, and forget the strategy."""
        gpu_info.cleanup_distributed()
        self.current_strategy = None

    def log_training_metrics(
        self,
        epoch: int,
        step: int,
        loss: float,
        learning_rate: float,
        gpu_utilization: dict[str, Any] | None = None,
    ) -> None:
        """Remember the numbers of a step of a loop of your own; runs of the engine have their journal.

        Args:
            gpu_utilization: per cent, by GPU; None asks NVML.
        """
        entry = {"epoch": epoch, "step": step, "loss": float(loss), "learning_rate": learning_rate}
        used = gpu_info.gpu_utilisation() if gpu_utilization is None else gpu_utilization
        self.training_metrics[f"epoch_{epoch}"].append(
            entry | {"gpu_utilization": used, "strategy": self.current_strategy}
        )

    def get_multi_gpu_metrics(self) -> dict[str, Any]:
        """strategy, gpu_info, and training_metrics: lists of what was logged, by "epoch_N"."""
        found = {epoch: list(entries) for epoch, entries in self.training_metrics.items()}
        return {"strategy": self.current_strategy, "gpu_info": gpu_info.get_gpu_info(), "training_metrics": found}

    def get_multi_gpu_status(self) -> dict[str, Any]:
        """multi_gpu_available, gpu_info, current_strategy, world_size, training_metrics, gpu_utilization, status."""
        found, launch_env = self.get_multi_gpu_metrics(), LaunchEnv.current()
        return {
            "multi_gpu_available": found["gpu_info"]["gpu_count"] >= 2,
            "gpu_info": found["gpu_info"],
            "current_strategy": found["strategy"],
            "world_size": launch_env.size if launch_env else 1,
            "training_metrics": found["training_metrics"],
            "gpu_utilization": gpu_info.gpu_utilisation(),
            "status": "success",
        }

    def _remember_strategy(self, model: nn.Module, ok: bool) -> tuple[nn.Module, bool]:
        if ok:
            self.current_strategy = type(model).__name__
        return model, ok


@cache
def get_shared_functions() -> Functions:
    """The one that the functions below speak of."""
    return Functions()


@wraps(wrap.setup_data_parallel)
def setup_data_parallel(*args: Any, **named: Any) -> tuple[nn.Module, bool]:
    return get_shared_functions().setup_data_parallel(*args, **named)


@wraps(wrap.setup_distributed_data_parallel)
def setup_distributed_data_parallel(*args: Any, **named: Any) -> tuple[nn.Module, bool]:
    return get_shared_functions().setup_distributed_data_parallel(*args, **named)


@wraps(wrap.setup_multi_gpu_training)
def setup_multi_gpu_training(*args: Any, **named: Any) -> tuple[nn.Module, bool, dict[str, Any]]:
    return get_shared_functions().setup_multi_gpu_training(*args, **named)


def log_training_metrics(
    epoch: int, step: int, loss: float, learning_rate: float, gpu_utilization: dict[str, Any] | None = None
) -> None:
    """Remember the numbers of a step of a loop of your own, for `get_multi_gpu_metrics`.

    Args:
        gpu_utilization: per cent, by GPU; None asks NVML.
    """
    get_shared_functions().log_training_metrics(epoch, step, loss, learning_rate, gpu_utilization)


def get_multi_gpu_metrics() -> dict[str, Any]:
    """strategy (None before a setup), gpu_info, and training_metrics: lists of what was logged, by "epoch_N"."""
    return get_shared_functions().get_multi_gpu_metrics()


def get_multi_gpu_status() -> dict[str, Any]:
    """multi_gpu_available, gpu_info, current_strategy, world_size, training_metrics, gpu_utilization, status."""
    return get_shared_functions().get_multi_gpu_status()


def cleanup_distributed() -> None:
    """End this process's group, if there is one. Runs of the engine end their own."""
    get_shared_functions().cleanup_distributed()
