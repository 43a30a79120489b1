import random

import numpy
import pytest
import torch

from multigpu_cli.runtime.determinism import (
    enable_determinism,
    enable_fast_kernels,
    seed_everything,
    seed_micro_batch,
    seed_weights,
    set_threads_per_rank,
)

CPU = torch.device("cpu")


def drawn() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_all_three_generators_follow_the_seed() -> None:
    seed_everything(7)
    first = drawn()
    seed_everything(8)
    other = drawn()
    seed_everything(7)
    assert drawn() == first
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_a_seed_may_have_63_bits() -> None:
    seed_everything(2**63 - 1)


def test_weights_have_a_stream_of_their_own() -> None:
    seed_weights(42)
    weights = torch.rand(5)
    seed_micro_batch(42, 0, 0, CPU)
    assert not torch.equal(torch.rand(5), weights)
    seed_weights(42)
    assert torch.equal(torch.rand(5), weights)


def test_each_micro_batch_has_its_own_numbers_whoever_runs_it() -> None:
    found = {}
    for seed in (1, 2):
        for step in range(3):
            for index in range(3):
                seed_micro_batch(seed, step, index, CPU)
                found[seed, step, index] = drawn()
    for generator in range(3):
        assert len({numbers[generator] for numbers in found.values()}) == 18
    drawn()  # whatever was drawn in between
    seed_micro_batch(1, 2, 1, CPU)
    assert drawn() == found[1, 2, 1]


def test_devices_that_share_a_pass_are_seeded_each_and_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataParallel's replicas drop units at random, each by the generator of its own GPU."""
    generators = tuple(torch.Generator() for _ in range(3))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    both = torch.device("cuda", 2), torch.device("cuda", 0)
    found = []
    for step in (1, 2, 1):
        seed_micro_batch(42, step, 0, *both)
        found.append([int(torch.randint(1 << 40, (), generator=generators[number])) for number in (2, 0)])
    assert found[0] == found[2]
    assert len({number for pair in found for number in pair}) == 4
    first = generators[2].initial_seed()
    seed_micro_batch(42, 1, 0, both[0])
    assert generators[2].initial_seed() == first, "the first one draws what it draws alone"


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


def test_kernels_without_a_deterministic_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    benchmark, fill = torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory
    try:
        enable_determinism()
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory = benchmark, fill
