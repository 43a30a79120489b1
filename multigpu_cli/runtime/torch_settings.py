"""Process-wide settings of torch: deterministic or fast kernels, and CPU threads."""

import os

import torch


def enable_determinism() -> None:
    """Use deterministic kernels only; an operator without one raises an error that names it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def enable_fast_kernels(device: torch.device) -> None:
    """On CUDA, use TF32 for fp32 matrix products, and let cuDNN benchmark its kernels for each new shape.

    The fastest kernel, and with it the last bits, may differ between runs, so --exact does not use this.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True


def set_threads_per_rank(workers_here: int, cpus: int, *, exact: bool) -> int:
    """Divide the cores among the workers of this machine; returns the number of threads of each.

    A single worker uses the user's OMP_NUM_THREADS; torchrun sets that to 1 for several. With --exact it is always 1,
    since the number of threads changes the order in which a kernel sums.
    """
    threads = 1 if exact else min(torch.get_num_threads(), cpus) if workers_here == 1 else max(1, cpus // workers_here)
    torch.set_num_threads(threads)
    return threads
