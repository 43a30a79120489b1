"""Seeds random generators as a function of (seed, step, micro-batch); torch's settings for a run."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy
import torch

from multigpu_cli.distributed.launch_env import prepare_cublas, prepare_inductor
from multigpu_cli.planning.batch import make_key

_INIT = 0x1417  # separates the random stream of the initial weights from the others
# in place of the number of a micro-batch, which is never so large
_OPTIMIZER, _AFTER_STEP, _LOSS = (2**40 + at for at in range(3))


def seed_everything(number: int) -> None:
    """Seed Python, NumPy and torch, on every GPU too."""
    seed_host(number)
    if torch.backends.cuda.is_built():  # else this would note the stack for nobody, which takes 7 ms the first time
        torch.cuda.manual_seed_all(number)


def seed_host(number: int) -> None:
    """Seed Python, NumPy and torch on the CPU; takes 10 µs, less than `torch.manual_seed` alone."""
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)


def seed_weights(seed: int, *, late: bool = False) -> None:
    """Seed all generators for building the model, equally on every rank.

    `late` is for weights that are created at the first forward pass, after data loading has drawn random numbers.
    """
    seed_everything(make_key(seed, _INIT, 1) if late else make_key(seed, _INIT))


def seed_micro_batch(seed: int, step: int, index: int, *devices: torch.device) -> None:
    """Seed all generators for one forward pass, so that a model draws the same numbers on any worker.

    Of GPUs, those of these devices alone. If several share the pass (DataParallel), each has its own seed.
    """
    number = make_key(seed, step, index)
    seed_host(number)
    for replica, device in enumerate(devices):
        if device.type == "cuda":
            own = make_key(seed, step, index, replica) if replica else number
            torch.cuda.default_generators[device.index or 0].manual_seed(own)


def seed_optimizer_step(seed: int, step: int, *devices: torch.device) -> None:
    """Seed the generators for a step of an optimizer that may draw random numbers, the same on every worker."""
    seed_micro_batch(seed, step, _OPTIMIZER, *devices)


def seed_after_step(seed: int, step: int, *devices: torch.device) -> None:
    """Seed the generators for `after_step` of model and task, the same on every worker."""
    seed_micro_batch(seed, step, _AFTER_STEP, *devices)


def seed_loss(seed: int, step: int, *devices: torch.device) -> None:
    """Seed the generators for a loss over the global batch, the same on every worker and for any micro-batches."""
    seed_micro_batch(seed, step, _LOSS, *devices)


class _Kernels(NamedTuple):
    """Torch's settings on which the choice of kernels depends, for the whole process."""

    deterministic: bool
    only_warns: bool  # where there is no deterministic kernel
    fills_memory: bool  # what was not initialized, to make its use deterministic
    benchmark: bool  # by cuDNN
    precision: str | None  # of fp32 matrix products; None where the caller has set parts of it by torch's newer names

    @classmethod
    def now(cls) -> "_Kernels":
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:
            precision = None
        fills_memory = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        return cls(*modes, fills_memory, torch.backends.cudnn.benchmark, precision)

    def apply(self) -> None:
        changes = self[:2] != _Kernels.now()[:2]
        if changes and "torch._inductor" in sys.modules:
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.only_warns)
        elif changes:  # the same without its import of inductor, which takes a second of CPU and 80 MB
            prepare_inductor(deterministic=self.deterministic)
            torch._C._set_deterministic_algorithms(self.deterministic, warn_only=self.only_warns)
        torch.utils.deterministic.fill_uninitialized_memory = self.fills_memory  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = self.benchmark
        if self.precision is not None:
            torch.set_float32_matmul_precision(self.precision)


def enable_determinism(*, only_warns: bool = False) -> None:
    """Use deterministic kernels only; an operator without one raises an error that names it, or warns."""
    prepare_cublas()
    _Kernels(True, only_warns, fills_memory=False, benchmark=False, precision="highest").apply()


def enable_fast_kernels(device: torch.device, *, benchmark: bool = True) -> None:
    """On CUDA, use TF32 for fp32 matrix products; with `benchmark`, cuDNN measures its kernels for each new shape.

    The fastest kernel, and with it the last bits, may differ between runs, so --exact does not use this.
    """
    if device.type == "cuda":
        _Kernels(False, only_warns=False, fills_memory=True, benchmark=benchmark, precision="high").apply()


@contextmanager
def choose_kernels(device: torch.device, benchmark: bool = True, *, exact: bool) -> Iterator[None]:
    """Deterministic or fast kernels for one run; afterwards the settings of before, unless others were made since."""
    before = _Kernels.now()
    enable_determinism() if exact else enable_fast_kernels(device, benchmark=benchmark)
    chosen = _Kernels.now()
    try:
        yield
    finally:
        if _Kernels.now() == chosen:
            before.apply()


def set_threads_per_rank(workers_here: int, cpus: int, *, exact: bool) -> int:
    """Divide the cores among the workers of this machine; returns the number of threads of each.

    A single worker uses the user's OMP_NUM_THREADS; torchrun sets that to 1 for several. With --exact it is always 1,
    since the number of threads changes the order in which a kernel sums.
    """
    threads = 1 if exact else min(torch.get_num_threads(), cpus) if workers_here == 1 else max(1, cpus // workers_here)
    torch.set_num_threads(threads)
    return threads


@contextmanager
def limit_threads(number: int) -> Iterator[None]:
    """Use this number of CPU threads inside the context."""
    outside = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(outside)
