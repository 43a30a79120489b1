"""Training scripts that call the Python API: each function takes the run folder."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.support.styles.hugging_face import Unpadded, bert, collate
from tests.support.styles.own_scripts import Fcn, Linear, Pairs, Scenes
from tests.support.styles.samples import Samples
from train_multi_gpu import train_with_multi_gpu

JOURNAL = {"log_interval": 1}
CALL: dict[str, Any] = {"num_epochs": 2, "screen": "silent", "global_batch_size": 8, "settings": JOURNAL}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Likeness(Samples):
    """siamese_network: two images, and whether they are of one kind."""

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        other = self.numbers[(index + index % 3) % len(self)]
        return (self.numbers[index], other), torch.tensor([float(index % 3 == 0)])


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(16, 1)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.sigmoid(self.head(torch.cat([self.body(one), self.body(other)], 1)))


def siamese(folder: str) -> None:
    torch.manual_seed(1)
    model = Siamese()
    loader = DataLoader(Likeness("train"), batch_size=4, shuffle=True)
    train_with_multi_gpu(model, loader, optimizer=sgd(model), criterion=nn.BCELoss(), save_dir=folder, **CALL)


def one_cycle(folder: str) -> None:
    torch.manual_seed(1)
    model = Linear()
    optimizer = sgd(model)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    loader = DataLoader(Pairs("train"), batch_size=4, shuffle=True)
    train_with_multi_gpu(model, loader, optimizer=optimizer, scheduler=scheduler, save_dir=folder, **CALL)


def parameter_groups(folder: str) -> None:
    torch.manual_seed(1)
    model = Linear()
    groups: list[dict[str, Any]] = [
        {"params": model.net[0].parameters()},
        {"params": model.net[2].parameters(), "lr": 0.5},
    ]
    loader = DataLoader(Pairs("train"), batch_size=4)
    train_with_multi_gpu(model, loader, optimizer=torch.optim.SGD(groups, lr=0.05), save_dir=folder, **CALL)


def weighted_sampler(folder: str) -> None:
    torch.manual_seed(1)
    dataset = Pairs("train")
    weights = [3.0 if dataset[at][1] else 1.0 for at in range(len(dataset))]
    sampler = WeightedRandomSampler(weights, len(dataset), generator=torch.Generator().manual_seed(3))
    model = Linear()
    train_with_multi_gpu(model, DataLoader(dataset, 4, sampler=sampler), optimizer=sgd(model), save_dir=folder, **CALL)


def data_collator(folder: str) -> None:
    """DataCollatorWithPadding, and the loss that the network returns."""
    torch.manual_seed(1)
    model, loader = bert(2), DataLoader(Unpadded("train"), batch_size=4, collate_fn=collate)
    call = CALL | {"settings": JOURNAL | {"task": "from-model"}}
    train_with_multi_gpu(model, loader, optimizer=sgd(model), save_dir=folder, **call)


def segmentation(folder: str) -> None:
    """With torch's own criterion."""

    def criterion(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["out"], targets.long(), ignore_index=255)

    torch.manual_seed(1)
    model, loader = Fcn(3), DataLoader(Scenes("train"), batch_size=4, shuffle=True)
    train_with_multi_gpu(model, loader, optimizer=sgd(model), criterion=criterion, save_dir=folder, **CALL)
