"""CLIP in small: digits and their captions in one space, with a learned temperature; the model has its loss.

python main_multi_gpu.py --data own_clip:pairs --model own_clip:TwoTowers --task from-model \
    --global-batch-size 256 --batch-size 32 --save-dir runs/clip
"""

from collections.abc import Mapping
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import Dataset

NAMES = "zero one two three four five six seven eight nine"
WORDS = [*NAMES.split(), "a", "light", "dark", "digit", "on", "the", "left", "right"]


def write_caption(digit: int, is_dark: bool, is_left: bool) -> Tensor:  # (8,) int64, the numbers of its words
    text = f"a {'dark' if is_dark else 'light'} digit {WORDS[digit]} on the {'left' if is_left else 'right'}"
    return torch.tensor([WORDS.index(word) for word in text.split()])


class Pairs(Dataset[dict[str, Tensor]]):
    """A digit, dark or light, at the left or the right of an image (1, 8, 16), and its caption."""

    def __init__(self, images: Tensor, digits: Tensor) -> None:
        self.images, self.digits = images, digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        is_dark, is_left = index % 2 == 0, index % 4 < 2
        image = torch.zeros(1, 8, 16)
        image[0, :, slice(0, 8) if is_left else slice(8, 16)] = self.images[index]
        caption = write_caption(int(self.digits[index]), is_dark, is_left)
        return {"image": 1 - image if is_dark else image, "text": caption}


def pairs(split: str, seed: int) -> Pairs:
    images, digits = map(torch.as_tensor, load_digits(return_X_y=True))
    part = {"train": slice(0, 1200), "val": slice(1200, 1400), "test": slice(1400, None)}[split]
    return Pairs(images.float().view(-1, 8, 8)[part] / 16, digits[part])


class TwoTowers(nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        self.of_image = nn.Sequential(*layers, nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, size))
        self.words, self.of_text = nn.Embedding(len(WORDS), 64), nn.Sequential(nn.ReLU(), nn.Linear(64, size))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:  # a row of each for each sample
        images, texts = self.of_image(image), self.of_text(self.words(text).sum(1))
        return {"image": normalize(images, dim=1), "text": normalize(texts, dim=1)}

    def global_loss(self, rows: Mapping[str, Tensor], targets: Any) -> Tensor:  # of all samples of the global batch
        logits = rows["image"] @ rows["text"].T * self.scale.exp()
        own = torch.arange(len(logits), device=logits.device)
        return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
