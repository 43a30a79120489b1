"""Settings of torch for the whole process: deterministic or fast kernels, and CPU threads."""

import os

import torch


def enable_determinism() -> None:
    """Kernels that give the same bits at each run; an operator that has none raises an error that names it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def enable_fast_kernels(device: torch.device) -> None:
    """On CUDA: TF32 for what stays in fp32, and cuDNN tries its kernels out on each new shape.

    Which kernel wins may differ from start to start, and with it the last bits: --exact goes without.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True


def set_threads_per_rank(workers_here: int, cpus: int, *, exact: bool) -> int:
    """Give each worker of this machine its part of the cores, so that they don't fight; returns the number.

    A lone worker keeps what the user set (OMP_NUM_THREADS); torchrun sets that to one for several. With --exact it is
    always one: the number of threads changes the order in which a kernel adds.
    """
    threads = 1 if exact else min(torch.get_num_threads(), cpus) if workers_here == 1 else max(1, cpus // workers_here)
    torch.set_num_threads(threads)
    return threads
