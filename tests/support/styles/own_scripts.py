"""What people bring from scripts of their own: masks, labels of 0 and 1, dicts, two views, a teacher, boxes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from multigpu_cli.data.loader import Batch
from multigpu_cli.tasks.base import BatchMetrics, Task
from tests.support.styles.samples import Samples


class Scenes(Samples):
    """Segmentation: an image, and a class for each pixel; 255 at the border."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.stack([self.numbers[index].outer(self.numbers[index]), self.numbers[index].repeat(8, 1)])
        mask = (image[0] > 0).to(torch.uint8) + (image[1] > 0.5).to(torch.uint8)
        mask[: 1 + index % 3] = 255
        return image, mask


class Fcn(nn.Module):
    """As torchvision's networks: a dict with `out`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, num_classes, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.net(x)}


class Tags(Samples):
    """Multi-label: whole numbers."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.numbers[index], (self.numbers[index, :3] > 0).long()


class Linear(nn.Module):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Two(Samples):
    """Several tasks: a dict of targets."""

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        row = self.numbers[index]
        return row, {"kind": int(row.sum() > 0), "size": row.norm()}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(8, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"kind": self.kind(h), "size": self.size(h).squeeze(1)}


class KindAndSize(Task):
    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        outputs, targets = model(batch.inputs), batch.targets
        size = F.mse_loss(outputs["size"], targets["size"], reduction="sum")
        return F.cross_entropy(outputs["kind"], targets["kind"], reduction="sum") + size

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        return BatchMetrics(self.loss_sum(model, batch).double(), torch.zeros(0, dtype=torch.int64))


class Views(Samples):
    """SimCLR: two noisy views of a sample; the others of the micro-batch are its negatives."""

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.numbers[index] + 0.1 * torch.randn(2, 8),)


class SimCLR(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, views: Tensor) -> Tensor:
        one, other = F.normalize(self.net(views), dim=-1).unbind(1)
        return F.cross_entropy(one @ other.t() / 0.5, torch.arange(len(one), device=one.device))


class Distilled(nn.Module):
    """A student, with its frozen teacher inside."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = Linear(), Linear()
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.softmax(self.teacher(x) / 2, dim=1)
        logits = self.student(x)
        soft = F.kl_div(F.log_softmax(logits / 2, dim=1), wanted, reduction="batchmean")
        return F.cross_entropy(logits, targets) + soft


class Pairs(Samples):
    num_classes = 2

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.numbers[index], int(self.numbers[index].sum() > 0)


class Boxes(Samples):
    """Detection: images of unlike sizes, a dict of targets each, and torchvision's collate_fn."""

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        image = self.numbers[index, :3, None, None].expand(3, 4 + index % 3, 5)
        return image, {"boxes": self.numbers[index, 3:7].expand(1 + index % 2, 4)}

    def collate_fn(self, samples: Any) -> Any:
        return tuple(zip(*samples, strict=True))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        found = [self.net(image.mean((1, 2))) for image in images]
        if targets is None or not self.training:
            return [{"boxes": each} for each in found]
        pairs = [(each, target["boxes"]) for each, target in zip(found, targets, strict=True)]
        boxes = torch.stack([F.smooth_l1_loss(each.expand_as(wanted), wanted) for each, wanted in pairs]).mean()
        return {"loss_box_reg": boxes, "loss_objectness": torch.stack(found).square().mean()}


class Ragged(Samples):
    """Sequences of unlike lengths, for pack_padded_sequence."""

    num_classes = 2

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.numbers[index, : 3 + index % 6], index % 2

    def collate_fn(self, samples: list[tuple[Tensor, int]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        rows = [row for row, _ in samples]
        lengths = torch.tensor([len(row) for row in rows])
        return (pad_sequence(rows, batch_first=True), lengths), torch.tensor([label for _, label in samples])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(rows[..., None], lengths.cpu(), batch_first=True, enforce_sorted=False)
        logits: Tensor = self.head(self.rnn(packed)[1][-1])
        return logits
