"""Reads an IterableDataset once into memory, as a map-style dataset."""

from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from multigpu_cli.errors import RequestError
from multigpu_cli.planning.rng_keys import make_key
from multigpu_cli.runtime.seeding import seed_everything

MOST = 100_000  # samples that are read
_STREAM = 0x57E4  # separates its random numbers from those of other streams


class MaterializedIterable(Dataset[Any]):
    """An IterableDataset, read once to its end, so that its samples have indices.

    Order, resume and exactness then hold as for any dataset. Two limits remain: its random numbers are drawn once, as
    it is read, and not in each epoch; and it must yield the same samples in every process.

    Raises:
        RequestError: it is empty, or yields more than a hundred thousand samples.
    """

    def __init__(self, stream: IterableDataset[Any], name: str, seed: int) -> None:
        seed_everything(make_key(seed, _STREAM))
        self.samples = list(islice(stream, MOST + 1))
        if not self.samples:
            raise RequestError(
                f"--data {name}: the iterable dataset is empty", remedy="return None if there is no such split"
            )
        if len(self.samples) > MOST:
            raise RequestError(
                f"--data {name}: the iterable dataset does not end after {MOST:,} samples",
                remedy="use a map-style dataset (__len__ and __getitem__), which can be resumed and divided exactly",
            )
        for attribute in ("num_classes", "classes", "collate_fn"):
            if hasattr(stream, attribute):
                setattr(self, attribute, getattr(stream, attribute))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]
