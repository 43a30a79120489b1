"""Networks, datasets and losses as the scripts of pytorch/examples have them; written anew."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from multigpu_cli.data.loader import Batch
from multigpu_cli.tasks.base import BatchMetrics, Task
from tests.support.styles.samples import Samples, Tokens

parser = argparse.ArgumentParser()  # half of the scripts read a command line when they are imported
parser.add_argument("--width", type=int, default=16)
args = parser.parse_args()


class Net(nn.Module):
    """mnist: convolutions, dropout, and log-probabilities out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, args.width, 3, 1)
        self.dropout, self.fc = nn.Dropout(0.25), nn.Linear(args.width * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.log_softmax(self.fc(torch.flatten(self.dropout(F.max_pool2d(x, 2)), 1)), dim=1)


def step_lr(step: int, total: int, gamma: float = 0.7) -> float:
    """StepLR, as a factor."""
    return gamma ** (2 * step // total)


class Rnn(nn.Module):
    """mnist_rnn: the rows of an image, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        _, (last, _) = self.rnn(x.view(-1, 8, 8))
        return F.log_softmax(self.fc(last[-1]), dim=1)


class Faces(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.sigmoid(self.numbers[index]), 0  # the label is there, and nobody looks at it


class VAE(nn.Module):
    """vae: reconstruction, mean and log-variance out."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mu, self.logvar = nn.Linear(8, 16), nn.Linear(16, 2), nn.Linear(16, 2)
        self.decode = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.encode(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.decode(z)), mu, logvar


class VaeLoss(Task):
    """Reconstruction and divergence, summed as in the script."""

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        recon, mu, logvar = model(batch.inputs)
        divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return F.binary_cross_entropy(recon, batch.inputs, reduction="sum") + divergence

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        return BatchMetrics(self.loss_sum(model, batch).double(), torch.zeros(0, dtype=torch.int64))


class Following(Tokens):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index, :-1], self.words[index, 1:]


class TransformerModel(nn.Module):
    """word_language_model: time first inside, so batch and time are swapped on the way in and out."""

    def __init__(self, ntoken: int = 10) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(ntoken, 16), nn.Linear(16, ntoken)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        src = self.encoder(tokens.t())
        mask = nn.Transformer.generate_square_subsequent_mask(len(src))
        logits: Tensor = self.decoder(self.layer(src, src_mask=mask, is_causal=True)).transpose(0, 1)
        return logits


class RNNModel(nn.Module):
    """word_language_model, with an LSTM."""

    def __init__(self, ntoken: int = 10) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(ntoken, 16)
        self.rnn, self.decoder = nn.LSTM(16, 16, 2, dropout=0.2), nn.Linear(16, ntoken)

    def forward(self, tokens: Tensor) -> Tensor:
        output, _ = self.rnn(self.drop(self.encoder(tokens.t())))
        logits: Tensor = self.decoder(self.drop(output)).transpose(0, 1)
        return logits


class Waves(Samples):
    """time_sequence_prediction: a sine, and the same one place later."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        wave = torch.sin(torch.arange(21) / 3 + self.numbers[index, 0])
        return wave[:-1], wave[1:]


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)

    def forward(self, input: Tensor) -> Tensor:
        h1, c1, h2, c2 = (torch.zeros(len(input), 8) for _ in range(4))
        outputs = []
        for value in input.split(1, dim=1):
            h1, c1 = self.lstm1(value, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


class Crops(Samples):
    """super_resolution: an image, and the larger one it was made from."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        large = torch.sigmoid(self.numbers[index].repeat(8, 1) + torch.arange(8.0).view(8, 1) / 4)[None]
        return F.avg_pool2d(large, 2), large


class SuperResolution(nn.Module):
    def __init__(self, upscale_factor: int = 2) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5, 1, 2), nn.Conv2d(8, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)

    def forward(self, x: Tensor) -> Tensor:
        enlarged: Tensor = self.pixel_shuffle(self.conv2(F.relu(self.conv1(x))))
        return enlarged


def psnr(outputs: Tensor, targets: Tensor) -> Tensor:
    """(n,) decibels."""
    return -10 * torch.log10((outputs - targets).square().flatten(1).mean(1))


class Nodes(Samples):
    """gcn: a sample is a node of the one graph, which the network holds."""

    num_classes = 3

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index % 3


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.register_buffer("features", torch.randn(24, 6, generator=drawn))
        edges = (torch.rand(24, 24, generator=drawn) < 0.2).float() + torch.eye(24)
        self.register_buffer("adjacency", edges / edges.sum(1, keepdim=True))
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, node: Tensor) -> Tensor:
        hidden = F.elu(self.adjacency @ self.first(self.features))
        logits: Tensor = (self.adjacency @ self.second(hidden))[node]
        return F.log_softmax(logits, dim=1)


class Polynomial(Samples):
    """regression: a polynomial of one number."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.numbers[index, :1]
        powers = torch.cat([x**degree for degree in range(1, 5)])
        return powers, powers @ torch.tensor([3.0, -1.0, 0.5, 0.2]) + 1


class LinearRegression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.fc(x)
        return value


class Photos(Dataset[Any]):
    """imagenet: torchvision's ImageFolder with its transforms."""

    def __init__(self, split: str, data_dir: str) -> None:
        from torchvision import datasets, transforms

        train = [transforms.RandomResizedCrop(64, scale=(0.5, 1.0)), transforms.RandomHorizontalFlip()]
        steps = train if split == "train" else [transforms.Resize(72), transforms.CenterCrop(64)]
        normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        self.folder = datasets.ImageFolder(
            str(Path(data_dir)), transforms.Compose([*steps, transforms.ToTensor(), normalize])
        )
        self.classes = self.folder.classes

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> Any:
        return self.folder[index]
