"""Reads a user's DataLoader: its dataset, the order of its samples, and the settings that it implies."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from multigpu_cli.api.settings import MultiGPUConfig
from multigpu_cli.data.epoch_order import SampleOrder
from multigpu_cli.data.materialized_iterable import MaterializedIterable
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.rng_keys import make_key
from multigpu_cli.runtime.seeding import seed_host

SPLITS = ("train", "val", "test")


class CollatedDataset(Dataset[Any]):
    """A dataset together with the collate_fn of its DataLoader."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class SequentialOrder:
    """Samples in the order of their indices, in every epoch (shuffle=False)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __call__(self, epoch: int) -> Tensor:
        return torch.arange(self.count)


class SamplerOrder:
    """The order of a user's sampler: drawn once per epoch on rank 0 and broadcast.

    Before, all generators are seeded from (seed, epoch) and `set_epoch` is called if there is one, so that an epoch
    that is repeated after a resume has the same order.
    """

    def __init__(self, sampler: Sampler[int], seed: int) -> None:
        self.sampler, self.seed = sampler, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __call__(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._broadcast_order(epoch)
        return self._order

    def _broadcast_order(self, epoch: int) -> Tensor:
        if not dist.is_initialized():
            return self._draw_order(epoch)
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        order = self._draw_order(epoch) if dist.get_rank() == 0 else torch.empty(len(self), dtype=torch.int64)
        order = order.to(device)
        dist.broadcast(order, src=0)
        return order.cpu()

    def _draw_order(self, epoch: int) -> Tensor:
        number = make_key(self.seed, epoch)
        seed_host(number)
        if isinstance(generator := getattr(self.sampler, "generator", None), torch.Generator):
            generator.manual_seed(number)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        order = torch.tensor(list(self.sampler), dtype=torch.int64)
        if len(order) != len(self):
            raise RequestError(f"sampler: its length is {len(self)}, but it drew {len(order)} samples")
        return order


def from_loader(
    loader: DataLoader[Any], config: MultiGPUConfig
) -> tuple[Dataset[Any], SampleOrder | None, MultiGPUConfig]:
    """Dataset, order of samples (None: shuffled by seed), and the config with the loader's batch size and workers.

    Raises:
        RequestError: it is no DataLoader, or it does not batch single samples itself.
    """
    dataset = with_collate(loader, config.seed)
    if loader.batch_size is None:
        raise RequestError(
            "train_loader: a batch_sampler, or batch_size=None, is not supported: only batches of single samples are "
            "the same on any number of GPUs",
            remedy="DataLoader(dataset, batch_size=…, sampler=…)",
        )
    settings = replace(
        config,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        pin_memory=config.pin_memory or loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
    )
    count = len(dataset)  # type: ignore[arg-type]
    stream = isinstance(loader.dataset, IterableDataset)
    return dataset, SequentialOrder(count) if stream else _find_order(loader.sampler, count, config.seed), settings


def with_collate(loader: DataLoader[Any], seed: int, split: str = "train") -> Dataset[Any]:
    """The loader's dataset, with its collate_fn where that is not torch's own.

    Raises:
        RequestError: it is no DataLoader, or its IterableDataset does not end.
    """
    if not isinstance(loader, DataLoader):
        raise RequestError(f"{split} loader: a {type(loader).__name__} is no DataLoader", remedy="DataLoader(dataset)")
    dataset, own = index_stream(loader.dataset, seed, split), loader.collate_fn is not default_collate
    return CollatedDataset(dataset, loader.collate_fn) if own else dataset


def index_stream(dataset: Any, seed: int, split: str) -> Any:
    """An IterableDataset is read once, so that its samples have indices; any other dataset is returned as it is."""
    if not isinstance(dataset, IterableDataset):
        return dataset
    return MaterializedIterable(
        dataset, f"{type(dataset).__name__}, split {split}", make_key(seed, SPLITS.index(split))
    )


def _find_order(sampler: Sampler[int] | Iterable[Any], count: int, seed: int) -> SampleOrder | None:
    if isinstance(sampler, DistributedSampler):  # the engine divides the samples among the ranks
        return None if sampler.shuffle else SequentialOrder(count)
    if isinstance(sampler, SequentialSampler):
        return SequentialOrder(count)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count:
        return None
    return SamplerOrder(sampler, seed)  # type: ignore[arg-type]
