"""A pipeline over .tar shards as webdataset has it, and shards as they are."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from tests.support.row_files import make_samples, write_tar


def write_shards(folder: Path) -> None:
    """Two of them, in webdataset's form."""
    write_tar(folder, [{name: sample[name] for name in ("npy", "cls")} for sample in make_samples()])


class Pipeline(IterableDataset[Any]):
    """WebDataset(shards).decode().to_tuple("npy", "cls"): it ends after an epoch."""

    num_classes = 2

    def __init__(self, data_dir: str, split: str) -> None:
        self.shards = sorted(Path(data_dir).glob("*.tar"))[split != "train" :]

    def __iter__(self) -> Iterator[Any]:
        for shard in self.shards:
            with tarfile.open(shard) as archive:
                members = {each.name: each for each in archive}
                for key in sorted({name.partition(".")[0] for name in members}):
                    read = {end: archive.extractfile(members[f"{key}.{end}"]).read() for end in ("npy", "cls")}  # type: ignore[union-attr]
                    yield torch.from_numpy(np.load(io.BytesIO(read["npy"]))), int(read["cls"])


class Net(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, num_classes))

    def forward(self, npy: Any) -> Any:
        return self.net(npy)
