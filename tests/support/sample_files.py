"""Small files of the kinds that people bring, for the rows of docs/start/what-you-have.md.

python -m tests.support.sample_files my_data
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

ROWS = 60


class Whole(nn.Linear):
    """A network of somebody's, saved as an object."""


def write_samples(folder: Path) -> None:
    """All of them; what is there is written anew."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    _write_images(folder / "photos", draws)
    _write_tables(folder, draws)
    _write_tokens(folder, draws)
    _write_weights(folder)


def _write_images(folder: Path, draws: np.random.Generator) -> None:
    """Two classes of 12 images, 40 to 50 pixels wide."""
    for brightness, kind in enumerate(("cat", "dog")):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for number in range(12):
            pixels = draws.integers(0, 128, (40, 40 + number % 11, 3)) + 120 * brightness
            Image.fromarray(pixels.astype(np.uint8)).save(folder / kind / f"{number}.png")


def _write_tables(folder: Path, draws: np.random.Generator) -> None:
    """One table in each common form: rows of a size, a weight, a colour and a kind; arrays of numbers and classes."""
    sizes, weights = draws.normal(size=ROWS).round(2), draws.normal(size=ROWS).round(2)
    colours = draws.choice(["red", "blue", ""], size=ROWS)
    kinds = np.where(sizes + weights > 0, "large", "small")
    rows = [",".join(map(str, row)) for row in zip(sizes, weights, colours, kinds, strict=True)]
    head, lines = "size,weight,colour,kind", "".join(f"{row}\n" for row in rows)
    (folder / "table.csv").write_text(f"{head}\n{lines}")
    (folder / "european.csv").write_text(f"{head}\n{lines}".replace(",", ";").replace(".", ","))
    (folder / "bare.csv").write_text(lines)
    (folder / "later.csv").write_text(f"{head}\n" + "".join(f"{row}\n" for row in rows[:9]))
    inputs = draws.normal(size=(ROWS, 8)).astype(np.float32)
    np.savez(folder / "arrays.npz", X=inputs, y=(inputs.sum(1) > 0).astype(np.int64))


def _write_tokens(folder: Path, draws: np.random.Generator) -> None:
    """A text of 26 letters, and token files as nanoGPT writes them."""
    (folder / "book.txt").write_text("".join(map(chr, draws.integers(97, 123, 2000))))
    (folder / "tokens").mkdir(exist_ok=True)
    for split in ("train", "val"):
        draws.integers(0, 100, 1000, dtype=np.uint16).tofile(folder / "tokens" / f"{split}.bin")


def _write_weights(folder: Path) -> None:
    """Of the page's `Net`, in the forms that programs write."""
    torch.manual_seed(0)
    net = {"body.weight": torch.randn(16, 8), "body.bias": torch.zeros(16)}
    net |= {"head.weight": torch.randn(2, 16), "head.bias": torch.zeros(2)}
    save_file(net, folder / "net.safetensors")
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": value for name, value in net.items()}}, folder / "ddp.pth")
    torch.save(net | {"head.weight": torch.randn(9, 16), "head.bias": torch.zeros(9)}, folder / "nine.pt")
    torch.save(Whole(8, 2), folder / "whole.pt")
    (folder / "keras.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(96))


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
