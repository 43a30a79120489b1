import os
import sys
from typing import Any

import pytest
import torch

from multigpu_cli.runtime.seeding import choose_kernels, enable_determinism, enable_fast_kernels, set_threads_per_rank
from tests.support.fork import exit_code


@pytest.mark.parametrize(("kind", "wanted"), [("cuda", (True, "high")), ("cpu", (False, "highest"))])
def test_only_gpus_try_kernels_out(kind: str, wanted: tuple[bool, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        enable_fast_kernels(torch.device(kind))
        assert (torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()) == wanted
    finally:
        torch.set_float32_matmul_precision(before)


def test_threads_are_shared_out() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads_per_rank(2, 8, exact=False) == 4 == torch.get_num_threads()
        assert set_threads_per_rank(3, 8, exact=False) == 2
        assert set_threads_per_rank(8, 2, exact=False) == 1 == torch.get_num_threads()
        assert set_threads_per_rank(1, 8, exact=True) == 1, "the number of threads changes the order of sums"
    finally:
        torch.set_num_threads(before)


def test_no_run_leaves_its_kernels_to_the_next() -> None:
    """In a notebook, say: a fast run, an exact one and a fast one, each as in a process of its own."""
    deterministic: Any = torch.utils.deterministic

    def now() -> tuple[Any, ...]:
        benchmark = torch.backends.cudnn.benchmark
        mode, fill = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
        return mode, fill, benchmark, torch.get_float32_matmul_precision()

    before, gpu, fast, exact = now(), torch.device("cuda"), (False, True, True, "high"), (True, False, False, "highest")
    for wanted in (fast, exact, fast):
        with choose_kernels(gpu, exact=wanted == exact):
            assert now() == wanted
        assert now() == before
    with choose_kernels(gpu, exact=False, benchmark=False):
        assert now() == (False, True, False, "high")
    with choose_kernels(gpu, exact=False), choose_kernels(gpu, exact=True):
        assert now() == exact, "one within the other, whatever it left"
    one, other = choose_kernels(gpu, exact=False), choose_kernels(gpu, exact=True)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert now() == exact, "one that ends first takes nothing from the other"
    other.__exit__(None, None, None)
    with choose_kernels(gpu, exact=False), pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    torch.set_float32_matmul_precision(before[-1])
    torch.backends.cudnn.benchmark = before[2]


def test_kernels_without_a_deterministic_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    deterministic: Any = torch.utils.deterministic
    benchmark, fill = torch.backends.cudnn.benchmark, deterministic.fill_uninitialized_memory
    try:
        enable_determinism()
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark, deterministic.fill_uninitialized_memory = benchmark, fill


def told() -> tuple[Any, bool]:
    import torch._inductor.config

    found: Any = torch._inductor.config
    return getattr(found, "deterministic", None), torch.are_deterministic_algorithms_enabled()


def test_the_compiler_is_told_of_exact_runs_also_where_it_is_imported_later() -> None:
    """As torch.use_deterministic_algorithms does, which imports it."""

    def work() -> None:
        for name in [name for name in sys.modules if name.startswith("torch._inductor")]:
            del sys.modules[name]  # other tests may have imported it
        os.environ.pop("TORCHINDUCTOR_DETERMINISTIC", None)
        with choose_kernels(torch.device("cpu"), exact=True):
            assert "torch._inductor" not in sys.modules
            assert torch.are_deterministic_algorithms_enabled()
            first = told()
        after = told()
        with choose_kernels(torch.device("cpu"), exact=True):
            again = told()
        torch.use_deterministic_algorithms(True)
        by_torch = told()
        assert first == again == by_torch
        assert after == ((by_torch[0] and False), False)

    assert exit_code(work) == 0
