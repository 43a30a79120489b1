"""The functions of the API for a training loop of the user's own: wrapping a model, and keeping its metrics."""

import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from multigpu_cli.api import monitoring, training
from multigpu_cli.api.settings import TrainingMode
from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.distributed.launch_env import LaunchEnv, refuse_srun_copies
from multigpu_cli.distributed.placement import check_gpus_exist, count_visible_gpus
from multigpu_cli.errors import RequestError


class Functions:
    """What MultiGPUTrainer() offers beside a run of its own; the public functions are those of `multi_gpu_trainer`.

    Attributes:
        current_strategy: DataParallel or DistributedDataParallel, once a setup has wrapped a model; else None.
        training_metrics: what was logged, by "epoch_N".
    """

    get_gpu_info = staticmethod(monitoring.get_gpu_info)
    print_gpu_info = staticmethod(monitoring.print_gpu_info)
    clear_gpu_memory = staticmethod(monitoring.clear_gpu_memory)
    train_with_multi_gpu = staticmethod(training.train_with_multi_gpu)
    evaluate_with_multi_gpu = staticmethod(training.evaluate_with_multi_gpu)
    optimize_batch_size_for_multi_gpu = staticmethod(monitoring.optimize_batch_size_for_multi_gpu)
    launch_distributed_training = staticmethod(monitoring.launch_distributed_training)
    estimate_training_speedup = staticmethod(monitoring.estimate_training_speedup)
    print_training_speedup_estimates = staticmethod(monitoring.print_training_speedup_estimates)

    def __init__(self) -> None:
        self.current_strategy: str | None = None
        self.training_metrics: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def setup_data_parallel(self, model: nn.Module, device_ids: list[int] | None = None) -> tuple[nn.Module, bool]:
        """Wrap the model in nn.DataParallel on these GPUs (default: all); RequestError: one of them does not exist.

        Returns the wrapped model and True; with fewer than two GPUs the unchanged model and False.
        """
        ids = _usable_gpus(device_ids)
        if len(ids) < 2:
            return model, False
        return self._record_wrapped(nn.DataParallel(model.to(f"cuda:{ids[0]}"), device_ids=ids))

    def setup_distributed_data_parallel(
        self,
        model: nn.Module,
        backend: str | None = None,
        init_method: str = "env://",
        world_size: int | None = None,
        rank: int | None = None,
        device_ids: list[int] | None = None,
        *,
        same_inputs: bool = False,
    ) -> tuple[nn.Module, bool]:
        """Wrap the model in DistributedDataParallel on the one device of this process: a GPU, or the CPU with gloo.

        The process group is formed if there is none: from torchrun's variables, or from `world_size` and `rank` with an
        `init_method` or MASTER_ADDR and MASTER_PORT. `cleanup_distributed` destroys it. Returns the wrapped model and
        True; without other ranks the unchanged model and False.

        Args:
            same_inputs: allow that ranks train on equal batches; else the first forward pass compares them, and raises
                RequestError: a loader without DistributedSampler would train every rank on all samples.

        Raises:
            RequestError: a GPU does not exist, srun started copies, or `world_size` and `rank` contradict the launcher.
        """
        launch_env = LaunchEnv.current()
        if not dist.is_initialized():
            given = rank is not None and world_size is not None
            if launch_env is None and given and init_method == "env://":
                launch_env = LaunchEnv.for_existing_group(rank or 0, world_size or 1, None)
            if launch_env is None and not given:
                refuse_srun_copies()
                return model, False
            size, own_rank = (launch_env.size, launch_env.rank) if launch_env else (world_size or 1, rank or 0)
            if (world_size not in (None, size)) or (rank not in (None, own_rank)):
                raise RequestError(f"world_size={world_size}, rank={rank}: the launcher says {size} and {own_rank}")
            backend = backend or ("nccl" if count_visible_gpus() else "gloo")
            if backend == "nccl" and not count_visible_gpus():
                raise RequestError("backend='nccl' needs GPUs, and none is visible", remedy="backend='gloo'")
            dist.init_process_group(backend, init_method=init_method, world_size=size, rank=own_rank)
        if ids := _usable_gpus(device_ids):
            local_rank = launch_env.local_rank if launch_env else dist.get_rank()
            device = torch.device("cuda", ids[local_rank % len(ids)])
            torch.cuda.set_device(device)
            wrapped = DistributedDataParallel(model.to(device), device_ids=[device])
        else:
            wrapped = DistributedDataParallel(model)
        if not same_inputs:
            check_inputs_differ(wrapped)
        return self._record_wrapped(wrapped)

    def setup_multi_gpu_training(
        self,
        model: nn.Module,
        strategy: str | TrainingMode = "auto",
        device_ids: list[int] | None = None,
        ddp_backend: str | None = None,
        ddp_init_method: str = "env://",
        *,
        same_inputs: bool = False,
    ) -> tuple[nn.Module, bool, dict[str, Any]]:
        """Wrap the model as the strategy says; returns it, whether it is wrapped, and `get_gpu_info()`.

        `auto` takes DistributedDataParallel where a launcher or a process group exists, and else leaves the model
        unchanged. It never takes DataParallel, which PyTorch advises against. `same_inputs` is as for
        `setup_distributed_data_parallel`. RequestError: the strategy is unknown or fsdp, or a GPU does not exist.
        """
        mode, wrapped = TrainingMode.named(strategy), False
        if mode is TrainingMode.FULLY_SHARDED_DATA_PARALLEL:
            problem = "setup_multi_gpu_training: no model is wrapped for fsdp"
            raise RequestError(problem, remedy="train_with_multi_gpu(…, strategy='fsdp'), or torch's own fully_shard")
        if mode is TrainingMode.DATA_PARALLEL:
            model, wrapped = self.setup_data_parallel(model, device_ids)
        elif mode is not TrainingMode.SINGLE_GPU:
            model, wrapped = self.setup_distributed_data_parallel(
                model, ddp_backend, ddp_init_method, device_ids=device_ids, same_inputs=same_inputs
            )
        return model, wrapped, monitoring.get_gpu_info()

    def cleanup_distributed(self) -> None:
        """Destroy this process's group, if there is one, and forget the strategy. Runs of the engine end their own."""
        if dist.is_available() and dist.is_initialized():
            gloo = dist.get_backend() == "gloo"
            dist.destroy_process_group()
            time.sleep(0.2 * gloo)  # its thread frees the last work under the GIL: a process that ends before aborts
        self.current_strategy = None

    def log_training_metrics(
        self, epoch: int, step: int, loss: float, learning_rate: float, gpu_utilization: dict[str, Any] | None = None
    ) -> None:
        """Record the numbers of one step, for `get_multi_gpu_metrics`; runs of the engine have their journal.

        `gpu_utilization` is in per cent, by GPU; None asks NVML.
        """
        entry: dict[str, Any] = {"epoch": epoch, "step": step, "loss": float(loss), "learning_rate": learning_rate}
        used = monitoring.gpu_utilisation() if gpu_utilization is None else gpu_utilization
        entry |= {"gpu_utilization": used, "strategy": self.current_strategy}
        self.training_metrics[f"epoch_{epoch}"].append(entry)

    def get_multi_gpu_metrics(self) -> dict[str, Any]:
        """strategy (None before a setup), gpu_info, and training_metrics: lists of what was logged, by "epoch_N"."""
        metrics = {epoch: list(entries) for epoch, entries in self.training_metrics.items()}
        return {"strategy": self.current_strategy, "gpu_info": monitoring.get_gpu_info(), "training_metrics": metrics}

    def get_multi_gpu_status(self) -> dict[str, Any]:
        """multi_gpu_available, gpu_info, current_strategy, world_size, training_metrics, gpu_utilization, status."""
        metrics, launch_env = self.get_multi_gpu_metrics(), LaunchEnv.current()
        return {
            "multi_gpu_available": metrics["gpu_info"]["gpu_count"] >= 2,
            "gpu_info": metrics["gpu_info"],
            "current_strategy": metrics["strategy"],
            "world_size": launch_env.size if launch_env else 1,
            "training_metrics": metrics["training_metrics"],
            "gpu_utilization": monitoring.gpu_utilisation(),
            "status": "success",
        }

    def _record_wrapped(self, model: nn.Module) -> tuple[nn.Module, bool]:
        self.current_strategy = type(model).__name__
        return model, True


def _usable_gpus(device_ids: list[int] | None) -> list[int]:
    """The GPUs of `device_ids`, which must exist; all visible ones for None."""
    if device_ids is None:
        return list(range(count_visible_gpus()))
    check_gpus_exist("device_ids", device_ids, count_visible_gpus())
    return device_ids


def check_inputs_differ(model: nn.Module) -> None:
    """Let the wrapped model's first forward pass for training compare its inputs over the ranks; later ones are free.

    The pass is collective already: all ranks reach it, and raise if some got equal inputs. Only tensors are compared.
    """

    def compare_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        handle.remove()
        digests: list[Any] = [None] * dist.get_world_size()
        leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.numel())
        tensors = {str(number): leaf for number, leaf in enumerate(leaves)}
        dist.all_gather_object(digests, fingerprint(tensors) if tensors else None)
        if None not in digests and len(set(digests)) < len(digests):
            raise RequestError(
                "the model's first batch is the same on several ranks: each rank trains on all samples, not on its "
                "share",
                remedy="DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset)), with "
                "loader.sampler.set_epoch(epoch) before each epoch; or same_inputs=True where that is meant",
            )

    handle = model.register_forward_pre_hook(compare_inputs, with_kwargs=True)
