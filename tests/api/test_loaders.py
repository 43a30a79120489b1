"""What a loader says beside its batch size: here, a stream of samples."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from multigpu_cli.api.inputs import from_loader, with_collate
from multigpu_cli.api.settings import MultiGPUConfig
from multigpu_cli.errors import RequestError
from tests.support.user_inputs import network
from train_multi_gpu import train_with_multi_gpu


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(self.count):
            yield torch.randn(8), number % 3


def test_a_stream_is_read_once_and_trained_on_in_its_own_order(tmp_path: Path) -> None:
    loader = DataLoader(Stream(12), batch_size=4)
    dataset, order, config = from_loader(loader, MultiGPUConfig(seed=3))
    assert order is not None
    assert order(0)[:].tolist() == order(1)[:].tolist() == list(range(12))
    assert config.batch_size == 4
    held_out = with_collate(loader, 3, "val")
    assert not torch.equal(dataset[0][0], held_out[0][0]), "what is drawn for validation is not what is trained on"
    found = train_with_multi_gpu(network(), loader, num_epochs=1, save_dir=str(tmp_path), screen="silent")
    assert found["summary"]["samples"] == 12


def test_a_stream_without_an_end_is_refused() -> None:
    with pytest.raises(RequestError, match="does not end after 100,000 samples"):
        from_loader(DataLoader(Stream(100_001)), MultiGPUConfig())
