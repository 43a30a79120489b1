from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.data.collate import Collate
from multigpu_cli.data.source import wrap_unlabeled


class Listed(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Ragged(Listed):
    def collate_fn(self, samples: list[Any]) -> Any:
        if isinstance(samples[0], Tensor):
            return torch.cat([sample.sum().view(1) for sample in samples])
        return torch.cat([sample.sum().view(1) for sample, _ in samples]), torch.tensor([label for _, label in samples])


ROW = torch.ones(3)
LIKE = torch.tensor(1)


@pytest.mark.parametrize(
    ("known", "new", "inputs"),
    [
        (Listed((ROW, LIKE)), Listed(ROW, ROW), (2, 3)),
        (TensorDataset(ROW[None], LIKE[None]), TensorDataset(torch.ones(2, 3)), (2, 3)),
        (Listed({"x": ROW, "label": 1}), Listed({"x": ROW}, {"x": ROW}), (2, 3)),
        (Ragged((ROW, 1)), Ragged(ROW, ROW[:2]), (2,)),
    ],
    ids=["tensors", "in memory", "mappings", "ragged"],
)
def test_inputs_alone_get_a_target_that_means_nothing(known: Any, new: Any, inputs: tuple[int, ...]) -> None:
    found = wrap_unlabeled(new, known)
    assert found is not None
    batch, targets = Collate(found)([(0, found[0]), (1, found[1])])
    assert batch.shape == inputs
    assert (targets.tolist(), targets.dtype) == ([0, 0], torch.int64)
    assert wrap_unlabeled(known, known) is None


def test_rows_of_tokens_have_their_targets_in_them() -> None:
    rows = Listed({"input_ids": torch.arange(4)})
    assert wrap_unlabeled(rows, rows) is None
