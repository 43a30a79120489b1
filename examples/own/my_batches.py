"""Samples of twelve shapes, and networks that take them: docs/howto/sample-shapes.md."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, smooth_l1_loss
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from multigpu_cli.tasks.base import BatchMetrics, Task


class Samples(Dataset):
    num_classes = 2

    def __init__(self, split):
        drawn = torch.Generator().manual_seed(len(split))
        self.rows = torch.randn(40, 6, generator=drawn)
        self.words = (torch.randint(5, (40, 1), generator=drawn) + torch.arange(8)) % 5

    def __len__(self):
        return len(self.rows)

    def row(self, index):  # two inputs and a class
        a, b = self.rows[index].split(3)
        return a, b, int(a.sum() > b.sum())


class Pair(Samples):
    def __getitem__(self, index):
        a, b, y = self.row(index)
        return torch.cat([a, b]), y


class Nested(Samples):
    def __getitem__(self, index):
        a, b, y = self.row(index)
        return (a, b), y


class Flat(Samples):
    def __getitem__(self, index):
        return self.row(index)


class Named(Samples):
    def __getitem__(self, index):
        a, b, y = self.row(index)
        return {"a": a, "b": b, "label": y}


class Ragged(Samples):
    def __getitem__(self, index):
        length = 2 + index % 5
        return (self.words[index, :length], length), int(length > 4)

    def collate_fn(self, samples):  # samples of unlike sizes: this makes the batch
        words = pad_sequence([words for (words, _), _ in samples], batch_first=True)
        lengths = torch.tensor([length for (_, length), _ in samples])
        return (words, lengths), torch.tensor([y for _, y in samples])


class Tokens(Samples):
    num_classes = 5  # the vocabulary

    def __getitem__(self, index):
        mask = torch.arange(8) < 4 + index % 5
        return {"input_ids": self.words[index], "attention_mask": mask.long()}


class TwoTargets(Samples):
    def __getitem__(self, index):
        a, b, y = self.row(index)
        return torch.cat([a, b]), y, a.norm()


class DictTargets(Samples):
    def __getitem__(self, index):
        a, b, y = self.row(index)
        return torch.cat([a, b]), {"class": y, "size": a.norm()}


class Tagged(Samples):
    def __getitem__(self, index):
        return self.rows[index], (self.rows[index, :2] > 0).long()


class Masked(Samples):
    def __getitem__(self, index):  # 255 where no class counts
        image = self.rows[index].view(1, 2, 3)
        return image, torch.where(image[0] < 2, (image[0] > 0).long(), 255)


class Alone(Samples):
    def __getitem__(self, index):
        return (self.rows[index],)


class Following(Samples):
    def __getitem__(self, index):
        return self.words[index, :-1], self.words[index, 1:]


class Labels(Samples):
    def __getitem__(self, index):  # labels that do not count are -100
        counts = torch.arange(8) < 3 + index % 6
        return {"input_ids": self.words[index], "labels": torch.where(counts, self.words[index], -100)}


class Scenes(Samples):
    def __getitem__(self, index):
        image = self.rows[index, :3, None, None].expand(3, 4 + index % 3, 4 + index % 2)
        return image, {"boxes": self.rows[index, 3:5].expand(1 + index % 3, 2)}

    def collate_fn(self, samples):
        return tuple(zip(*samples, strict=True))  # torchvision's own recipe: a list of images, a list of targets


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 2)

    def forward(self, x):
        return self.net(x)


class Two(One):
    def forward(self, a, b):
        return self.net(torch.cat([a, b], 1))


class Whole(One):
    def forward(self, batch):
        return self.net(torch.cat([batch["a"], batch["b"]], 1))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(5, 4), nn.Linear(5, 2)

    def forward(self, tokens, lengths=None):
        return self.head(torch.cat([self.embedding(tokens), lengths[:, None].float()], 1))


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))

    def forward(self, input_ids, attention_mask):
        return self.net(input_ids) * attention_mask[..., None]


class Scored(Writer):
    def forward(self, tokens, targets=None):
        logits = self.net(tokens)
        loss = None if targets is None else cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class LikeTransformers(Writer):
    def forward(self, input_ids, labels=None):
        logits = self.net(input_ids)
        return SimpleNamespace(logits=logits, loss=cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6))

    def forward(self, x):
        return mse_loss(self.net(x), x)


class Pixels(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.net = nn.Conv2d(1, num_classes, 1)

    def forward(self, images):
        return self.net(images)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, images, targets=None):
        said = [self.net(image.mean((1, 2))) for image in images]
        if not self.training:
            return [{"boxes": each} for each in said]  # as torchvision's: no loss in evaluation mode
        pairs = list(zip(said, (target["boxes"] for target in targets), strict=True))
        boxes = torch.stack([smooth_l1_loss(each.expand_as(wanted), wanted) for each, wanted in pairs]).mean()
        return {"loss_boxes": boxes, "loss_size": torch.stack(said).square().mean()}


class Both(Task):  # several targets need a loss that knows what they are
    def loss_sum(self, model, batch):
        classes, sizes = batch.targets.values() if isinstance(batch.targets, dict) else batch.targets
        outputs = model(batch.inputs)
        size = mse_loss(outputs[:, 1], sizes, reduction="sum")
        return cross_entropy(outputs, classes, reduction="sum") + size

    def measure(self, model, batch):
        return BatchMetrics(self.loss_sum(model, batch).double(), torch.zeros(0, dtype=torch.int64))
