"""Random state as a function of (seed, step, micro-batch), and how many threads a worker may use."""

import os
import random

import numpy
import torch

from multigpu_cli.planning.rng_keys import make_key

_INIT = 0x1417  # keeps the random stream of the initial weights apart from the others


def seed_everything(number: int) -> None:
    """Seed Python, NumPy and torch on every device."""
    seed_host(number)
    torch.manual_seed(number)


def seed_host(number: int) -> None:
    """Seed Python, NumPy and torch on the CPU: 10 µs, while `torch.manual_seed` alone takes longer."""
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)


def seed_weights(seed: int, *, late: bool = False) -> None:
    """Seed all generators for building the model, alike on every rank.

    Args:
        late: for weights that are made at the first forward pass, by which time fetching data has drawn numbers.
    """
    seed_everything(make_key(seed, _INIT, 1) if late else make_key(seed, _INIT))


def seed_micro_batch(seed: int, step: int, index: int, *devices: torch.device) -> None:
    """Seed all generators for one forward pass: what a model draws is then the same on whatever worker it runs.

    Of torch's only those of the CPU and of these devices: `torch.manual_seed` costs ten times as much. Of several that
    share the pass (DataParallel), each draws numbers of its own.
    """
    number = make_key(seed, step, index)
    seed_host(number)
    for lane, device in enumerate(devices):
        if device.type == "cuda":
            own = make_key(seed, step, index, lane) if lane else number
            torch.cuda.default_generators[device.index or 0].manual_seed(own)


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
