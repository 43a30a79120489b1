"""Reads an IterableDataset once into memory, as a map-style dataset."""

from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from multigpu_cli.errors import RequestError
from multigpu_cli.planning.rng_keys import make_key
from multigpu_cli.runtime.seeding import seed_everything

MOST = 100_000  # samples that are read from a stream
_STREAM = 0x57E4  # keeps what a stream draws apart from other random streams


class MaterializedIterable(Dataset[Any]):
    """A stream (IterableDataset), read once to its end, so that its samples have numbers.

    Order, resume and exactness then hold as for any dataset. What can't be promised: randomness inside of the stream is
    drawn once, in that reading, and not anew in each epoch; and it must give every process the same samples.

    Raises:
        RequestError: it is empty, or does not end within a hundred thousand samples.
    """

    def __init__(self, stream: IterableDataset[Any], name: str, seed: int) -> None:
        seed_everything(make_key(seed, _STREAM))
        self.samples = list(islice(stream, MOST + 1))
        if not self.samples:
            raise RequestError(f"--data {name}: the stream is empty", remedy="return None where there is no such split")
        if len(self.samples) > MOST:
            raise RequestError(
                f"--data {name}: no end of the stream after {MOST:,} samples, which have no numbers",
                remedy="a map-style dataset (__len__ and __getitem__): only that can be resumed and shared out exactly",
            )
        for attribute in ("num_classes", "classes", "collate_fn"):
            if hasattr(stream, attribute):
                setattr(self, attribute, getattr(stream, attribute))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]
