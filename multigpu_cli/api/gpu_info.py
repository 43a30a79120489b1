"""Information about the visible GPUs, from torch and NVML."""

import gc
from typing import Any

import torch
import torch.distributed as dist

from multigpu_cli.monitor import gpu
from multigpu_cli.monitor.console import Console
from multigpu_cli.runtime.choose_strategy_and_devices import count_visible_gpus

_GIB = 2**30


def get_gpu_info() -> dict[str, Any]:
    """The GPUs that this process may use.

    Returns:
        cuda_available, gpu_count, gpu_details (id, name, memory_gb, compute_capability, multi_processor_count, status
        of each), total_memory_gb (GiB), compute_capability (a list), nccl_available, status "success".
    """
    details = [_details(number) for number in range(count_visible_gpus())]
    return {
        "cuda_available": bool(details),
        "gpu_count": len(details),
        "gpu_details": details,
        "total_memory_gb": round(sum(each["memory_gb"] for each in details), 2),
        "compute_capability": [each["compute_capability"] for each in details],
        "nccl_available": dist.is_available() and dist.is_nccl_available(),
        "status": "success",
    }


def _details(number: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(number)
    return {
        "id": number,
        "name": found.name,
        "memory_gb": round(found.total_memory / _GIB, 2),
        "compute_capability": f"{found.major}.{found.minor}",
        "multi_processor_count": found.multi_processor_count,
        "status": "healthy",
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
    return {f"gpu_{each.number}": each.utilisation for each in gpu.list_gpus(nvml)}


def peak_memory_gb() -> float:
    """GiB: the most that torch has held on any visible GPU since it started or was reset; 0.0 without one."""
    return max((torch.cuda.max_memory_allocated(i) / _GIB for i in range(count_visible_gpus())), default=0.0)


def clear_gpu_memory() -> None:
    """Release the memory that torch caches on the GPUs in use. Training does not need it."""
    gc.collect()
    torch.cuda.empty_cache()  # of all GPUs in use; selecting another one would allocate memory on it
