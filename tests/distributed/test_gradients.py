"""The number of workers is a speed knob: the same first gradient, the same curve, the same statistics (DESIGN §1)."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.launcher import SECONDS
from tests.distributed.step_worker import take_first_steps
from tests.distributed.steps import CASES, STEPS, WORKERS
from tests.support.run_training import fork_ranks

MANY = [workers for workers in WORKERS if workers > 1]
SELDOM = {f"{network}-idle-double" for network in ("own-plain", "convnet", "har-convnet")}
SELDOM |= {f"{network}-uneven-single" for network in ("convnet", "har-convnet")}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SELDOM else name for name in CASES]
DOUBLE = [name for name, case in zip(NAMES, CASES.values(), strict=True) if case.double]


class Found(dict[tuple[str, int, int], dict[str, Any]]):
    """What every rank found in every case, on 1, 2, 3 and 4 workers; four forks for all that are not slow."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._look([name for name in CASES if name not in SELDOM])

    def _look(self, names: list[str]) -> None:
        fork_ranks(max(WORKERS), partial(take_first_steps, self._out, names), SECONDS)
        for name, workers in product(names, WORKERS):
            for rank in range(workers):
                self[name, workers, rank] = torch.load(self._out / f"{name}-{workers}-{rank}.pt", weights_only=True)

    def __missing__(self, key: tuple[str, int, int]) -> dict[str, Any]:
        self._look([key[0]])
        return self[key]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("steps"))


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, relative to each tensor's largest element."""
    assert list(one) == list(other)
    scales = {name: float(value.double().abs().max()) or 1.0 for name, value in other.items()}
    return max(float((one[name].double() - other[name].double()).abs().max()) / scales[name] for name in other)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The length of the difference, relative to the length of the whole gradient."""
    both = [torch.cat([value.double().flatten() for value in side.values()]) for side in (one, other)]
    return float((both[0] - both[1]).norm() / both[1].norm())


@pytest.mark.parametrize("workers", MANY)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_gradient_is_that_of_one_worker(found: Found, name: str, workers: int) -> None:
    alone = found[name, 1, 0]
    for rank in range(workers):
        mine = found[name, workers, rank]
        assert mine["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-12 if CASES[name].double else 1e-6)
        assert furthest(mine["gradient"], alone["gradient"]) < (1e-12 if CASES[name].double else 1e-5)
        assert distance(mine["gradient"], alone["gradient"]) < (1e-12 if CASES[name].double else 1e-6)


@pytest.mark.parametrize("workers", MANY)
@pytest.mark.parametrize("name", DOUBLE)
def test_all_steps_are_those_of_one_worker(found: Found, name: str, workers: int) -> None:
    alone, mine = found[name, 1, 0], found[name, workers, 0]
    assert len(alone["losses"]) == CASES[name].steps > 1
    assert mine["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert furthest(mine["state"], alone["state"]) < 1e-9
    assert len(set(alone["losses"])) == CASES[name].steps, "and something moved"


@pytest.mark.parametrize("workers", MANY)
def test_fifty_steps_in_single_precision_without_batchnorm(found: Found, workers: int) -> None:
    alone, mine = found["mlp-uneven-single", 1, 0], found["mlp-uneven-single", workers, 0]
    assert len(alone["losses"]) == STEPS
    assert mine["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.parametrize("workers", MANY)
@pytest.mark.parametrize("name", NAMES)
def test_all_workers_have_the_same_bits(found: Found, name: str, workers: int) -> None:
    first = found[name, workers, 0]
    for rank in range(1, workers):
        state = found[name, workers, rank]["state"]
        assert all(torch.equal(state[key], value) for key, value in first["state"].items())
        assert found[name, workers, rank]["losses"] == first["losses"]


@pytest.mark.parametrize("name", [name for name in CASES if "own-" in name and "plain" not in name])
def test_there_are_statistics_to_compare(found: Found, name: str) -> None:
    state = found[name, 1, 0]["state"]
    [mean] = [value for key, value in state.items() if key.endswith("running_mean")]
    [count] = [value for key, value in state.items() if key.endswith("num_batches_tracked")]
    assert float(mean.abs().max()) > 0
    assert int(count) == CASES[name].steps
