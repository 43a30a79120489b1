"""A dataset of PIL images with timm's own transforms, as its training script makes them."""

from typing import Any

import numpy as np
from PIL import Image
from timm.data import create_transform

from tests.support.styles.samples import Samples


class Images(Samples):
    num_classes = 2

    def __init__(self, split: str) -> None:
        super().__init__(split)
        self.transform = create_transform(
            input_size=(3, 32, 32), is_training=split == "train", color_jitter=0.3, hflip=0.5
        )

    def __getitem__(self, index: int) -> tuple[Any, int]:
        label = index % 2
        pixels = np.outer(self.numbers[index], self.numbers[index]) * 30 + 100 * label + 60
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).resize((40, 40)).convert("RGB")
        return self.transform(image), label
