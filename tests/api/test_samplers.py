"""Samplers of the user's own: drawn on rank 0, the same on every rank, of one length."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from multigpu_cli.api.inputs import from_loader
from multigpu_cli.api.settings import MultiGPUConfig
from multigpu_cli.data.order import SampleOrder
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from tests.support.ranks import run_on_each_rank
from tests.support.user_inputs import Points, network
from train_multi_gpu import train_with_multi_gpu


class Curriculum(Sampler[int]):
    """The samples from the epoch's number on; with `grows`, more of them in each epoch."""

    def __init__(self, *, grows: bool = False) -> None:
        self.epoch, self.grows = 0, grows
        self.heard: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.heard.append(epoch)

    def __len__(self) -> int:
        return 16 * (self.epoch + 1) if self.grows else 16

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + len(self)))


class Fixed(Curriculum):
    """Always these samples."""

    def __init__(self, samples: list[int], declared: int) -> None:
        super().__init__()
        self.samples, self.declared = samples, declared

    def __len__(self) -> int:
        return self.declared

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)


def order_of(sampler: Sampler[int]) -> SampleOrder:
    _, order, _ = from_loader(DataLoader(Points(48), 8, sampler=sampler), MultiGPUConfig())
    assert order is not None
    return order


def test_every_rank_tells_the_sampler_its_epoch() -> None:
    def draw(_: World | None) -> tuple[list[list[int]], list[int]]:
        order = order_of(sampler := Curriculum())
        return [order(epoch)[:].tolist() for epoch in (0, 1, 1, 4)], sampler.heard

    alone, *ranks = draw(None), *run_on_each_rank(2, draw)
    assert ranks == [alone] * 2
    orders, heard = alone
    assert [order[0] for order in orders] == [0, 1, 1, 4]
    assert heard == [0, 1, 4]


def test_sampler_that_grows_is_refused_on_every_rank(tmp_path: Path) -> None:
    def train(world: World | None) -> str:
        loader = DataLoader(Points(), 8, sampler=Curriculum(grows=True))
        folder = str(tmp_path / f"run-{world.size if world else 1}")
        with pytest.raises(RequestError) as refused:
            train_with_multi_gpu(
                network(), loader, num_epochs=2, global_batch_size=16, save_dir=folder, screen="silent"
            )
        return str(refused.value)

    alone, *ranks = train(None), *run_on_each_rank(2, train)
    assert ranks == [alone] * 2
    assert "in epoch 2 its Curriculum drew 32 samples, and the run is planned with 16" in alone
    assert "by init_from" in alone


@pytest.mark.parametrize(
    ("samples", "declared", "problem"),
    [
        ([1, 2, 3], 4, "in epoch 1 its Fixed drew 3 samples, and the run is planned with 4"),
        ([1, 48, 2], 3, "in epoch 1 its Fixed drew sample 48, and the dataset has 48, counted from 0"),
    ],
)
def test_wrong_draw_is_refused_on_every_rank(samples: list[int], declared: int, problem: str) -> None:
    def draw(_: World | None) -> str:
        with pytest.raises(RequestError) as refused:
            order_of(Fixed(samples, declared))(0)
        return str(refused.value)

    alone, *ranks = draw(None), *run_on_each_rank(2, draw)
    assert ranks == [alone] * 2
    assert problem in alone


class Backwards(DistributedSampler[int]):
    """An order of its own, divided among ranks."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.dataset) - 1, -1, -self.num_replicas))  # type: ignore[arg-type]


def test_sampler_that_divides_samples_among_ranks_is_refused(tmp_path: Path) -> None:
    assert order_of(Backwards(Points(48), num_replicas=1, rank=0))(0)[:].tolist() == list(range(47, -1, -1))
    sampler = Backwards(Points(48), num_replicas=2, rank=0)
    with pytest.raises(RequestError, match="divides the samples among 2 ranks"):
        train_with_multi_gpu(network(), DataLoader(Points(), 8, sampler=sampler), save_dir=str(tmp_path / "run"))
    assert not list(tmp_path.iterdir())
