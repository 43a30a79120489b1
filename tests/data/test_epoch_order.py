from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.loader import Loader
from multigpu_cli.data.order import BlockOrder, shuffle_numbers
from multigpu_cli.data.source import DataSource
from multigpu_cli.planning.batch import plan_batches


def test_every_sample_once() -> None:
    for count in (1, 2, 97, 1000):
        assert shuffle_numbers(count, 42, 0).sort().values.tolist() == list(range(count))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    torch.manual_seed(5)
    first = shuffle_numbers(500, 42, 3)
    torch.rand(1000)
    assert torch.equal(shuffle_numbers(500, 42, 3), first)
    others = [shuffle_numbers(500, seed, epoch) for seed, epoch in ((42, 4), (43, 3), (3, 42))]
    assert all(not torch.equal(other, first) for other in others)


def test_asking_for_an_order_draws_nothing_from_the_models_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    shuffle_numbers(500, 42, 3)
    assert torch.equal(torch.rand(3), expected)


def test_orders_are_well_mixed() -> None:
    """Each sample meets each tenth of an epoch about equally often."""
    places = torch.stack([shuffle_numbers(100, 1, epoch).argsort() for epoch in range(500)]).float()
    assert float((places.mean(0) - 49.5).abs().max()) < 6  # 4.6 deviations of a uniform draw's mean


def test_the_order_never_changes_between_versions() -> None:
    """A checkpoint says only how many steps were done: another order would train samples twice."""
    assert shuffle_numbers(8, 42, 0).tolist() == [1, 3, 6, 2, 4, 5, 7, 0]


def train_attempts(
    attempts: list[tuple[int, int]], epochs: int, loader: Loader, size: int, whole: int
) -> list[list[int]]:
    """The samples of each step of a run that was interrupted: each attempt is (workers, steps until it is killed)."""
    steps: list[list[int]] = []
    for workers, length in [*attempts, (1, 10**6)]:
        plan = plan_batches(samples=loader.size, micro_batch=size, workers=workers, global_batch=whole)
        end = min(len(steps) + length, epochs * plan.steps_per_epoch)
        while len(steps) < end:
            epoch, first = divmod(len(steps), plan.steps_per_epoch)
            ranks = [[work for _, work in loader.epoch(plan, epoch, first, rank, 1)] for rank in range(workers)]
            rows = list(zip(*ranks, strict=True))[: end - len(steps)]
            steps += [[i for work in row for batch in work for i in batch.sample_indices.tolist()] for row in rows]
    return steps


@settings(max_examples=60)
@given(
    samples=st.integers(5, 40),
    batch=st.integers(1, 9),
    whole=st.integers(5, 45),
    epochs=st.integers(1, 3),
    attempts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=4),
)
def test_no_interruption_and_no_number_of_workers_changes_a_step(
    samples: int, batch: int, whole: int, epochs: int, attempts: list[tuple[int, int]]
) -> None:
    split = TensorDataset(torch.arange(samples).float(), torch.zeros(samples, dtype=torch.int64))
    source = DataSource(train=split, val=None, test=None, input_shape=(), num_classes=2)
    loader = Loader(split, source, DataConfig(), device=torch.device("cpu"), seed=7)
    interrupted = train_attempts(attempts, epochs, loader, batch, whole)
    assert interrupted == train_attempts([], epochs, loader, batch, whole)
    seen = sorted(index for step in interrupted for index in step)
    assert seen == sorted(list(range(samples)) * epochs)


@settings(deadline=None, max_examples=100)
@given(
    count=st.integers(1, 300),
    block=st.integers(1, 40),
    window=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
def test_blocks_hold_each_sample_once_however_the_order_is_cut(
    count: int, block: int, window: int, cuts: list[int]
) -> None:
    order = BlockOrder(count, 42, 1, block, window)
    whole = order[:]
    assert whole.sort().values.tolist() == list(range(count))
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    again = BlockOrder(count, 42, 1, block, window)
    pieces = [again[first:last] for first, last in pairwise(edges)]
    assert torch.equal(torch.cat(pieces), whole)


def test_blocks_are_shuffled_by_seed_and_epoch() -> None:
    first = BlockOrder(1000, 42, 0, 10, 4)[:]
    others = [BlockOrder(1000, 42, 1, 10, 4)[:], BlockOrder(1000, 43, 0, 10, 4)[:]]
    assert not any(torch.equal(first, other) for other in others)
    assert len(set((first // 10)[:40].tolist())) == 4, "a window holds its blocks"
    assert (first.diff() != 1).float().mean() > 0.9, "samples of a window are mixed"
    assert BlockOrder(8, 42, 0, 2, 2)[:].tolist() == [2, 3, 1, 0, 4, 5, 6, 7], (
        "a run of an earlier version goes on in its order"
    )
