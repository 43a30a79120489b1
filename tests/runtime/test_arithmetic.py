"""Checksums of what a device computes: repeatable, without a trace, and different where a kernel is."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional

from multigpu_cli.runtime.arithmetic import compute_checksums

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _computed_again() -> Iterator[None]:
    compute_checksums.cache_clear()
    yield
    compute_checksums.cache_clear()


def test_checksums_repeat_after_other_work_and_in_other_processes() -> None:
    first = compute_checksums(CPU, "off")
    torch.nn.Conv2d(3, 4, 3)(torch.randn(2, 3, 8, 8)).sum().backward()
    compute_checksums.cache_clear()
    with torch.no_grad():
        assert compute_checksums(CPU, "off") == first
    code = (
        "import torch; from multigpu_cli.runtime.arithmetic import compute_checksums; torch.set_num_threads(2);"
        "print(compute_checksums(torch.device('cpu'), 'off'))"
    )
    path = {"PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | path, capture_output=True, text=True)
    assert ended.stdout.strip() == str(first)


def test_checksums_differ_by_precision() -> None:
    single, half = (compute_checksums(CPU, precision) for precision in ("off", "bf16"))
    assert single["checksum of products"] != half["checksum of products"]
    assert single["checksum of convolutions"] != half["checksum of convolutions"]


def test_checksums_leave_no_trace_in_the_process() -> None:
    def read_state() -> tuple[Any, ...]:
        deterministic: Any = torch.utils.deterministic
        draws = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
        modes = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
        kernels = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.get_num_threads()
        return draws, modes, kernels, torch.get_float32_matmul_precision(), torch.is_grad_enabled()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = read_state()
        compute_checksums(CPU, "off")
        assert read_state() == before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("module", "function", "family"),
    [
        (functional, "linear", "products"),
        (functional, "conv1d", "convolutions"),
        (functional, "layer_norm", "reductions"),
    ],
)
def test_a_kernel_that_rounds_differently_changes_its_checksum(
    module: Any, function: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, compute = compute_checksums(CPU, "off"), getattr(module, function)
    compute_checksums.cache_clear()
    monkeypatch.setattr(module, function, lambda *inputs: compute(*inputs) * (1 + 2**-22))
    different = compute_checksums(CPU, "off")
    assert [name for name in usual if usual[name] != different[name]] == [f"checksum of {family}"]
