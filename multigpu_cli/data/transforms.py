"""Images and whole batches: decoded, normalized per channel (--mode), augmented, and mixed as the settings ask for."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigpu_cli.capabilities import TRANSFORMS, load
from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.collate import describe_shapes, to_device
from multigpu_cli.data.files import explain_unreadable
from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.runtime.factories import find_factory, import_extra

MODES = ("flatten", "average", "first")


@dataclass(frozen=True)
class Standardised:
    """Normalizes a stored batch (n, C, …) of any dtype to float32, mean 0 and deviation 1 per channel; applies `mode`.

    `flatten` keeps all channels (n, C, …), `average` (their mean) and `first` one. Means and deviations are of `train`.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    mode: str
    _constants: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, batch: Tensor) -> Tensor:
        mean, scale = self._on(batch.device, batch.ndim)
        if self.mode == "first":
            return (batch[:, :1].float() - mean[:, :1]) * scale[:, :1]
        standardised = (batch - mean if batch.dtype == torch.float32 else batch.float().sub_(mean)).mul_(scale)
        return standardised.mean(dim=1, keepdim=True) if self.mode == "average" else standardised

    def _on(self, device: torch.device, ndim: int) -> tuple[Tensor, Tensor]:
        """Mean and 1/deviation, (1, C, 1, …); copied to a device once: a copy per batch would stall the stream."""
        if (device, ndim) not in self._constants:
            shape = (1, -1) + (1,) * (ndim - 2)
            mean = torch.tensor(self.mean, device=device).view(shape)
            scale = torch.tensor([1 / (deviation or 1.0) for deviation in self.deviation], device=device).view(shape)
            self._constants[device, ndim] = mean, scale
        return self._constants[device, ndim]


def fit_standardised(train: Tensor, mode: str) -> Standardised:
    """Learn the channels' means and deviations from the stored training samples (n, C, …)."""
    mean, deviation = zip(*(_moments(train[:, channel]) for channel in range(train.shape[1])), strict=True)
    return Standardised(mean, deviation, mode)


def model_input_shape(sample_shape: Sequence[int], mode: str) -> tuple[int, ...]:
    """Return a sample's shape as the model receives it; RequestError if the mode is unknown, or not for vectors."""
    if mode not in MODES:
        raise RequestError(f"--mode: unknown name {mode!r}", remedy=did_you_mean(mode, MODES))
    if mode == "flatten":
        return tuple(sample_shape)
    if len(sample_shape) < 2:
        problem = f"--mode {mode} needs samples with channels; --data gives vectors of {sample_shape[0]} numbers"
        raise RequestError(problem, remedy="use --mode flatten")
    return (1, *sample_shape[1:])


def _moments(values: Tensor) -> tuple[float, float]:
    """Mean and standard deviation; for bytes from a histogram, which is exact and needs no float copy of the data."""
    if values.dtype != torch.uint8:
        spread, mean = torch.std_mean(values.double(), correction=0)
        return float(mean), float(spread)
    counts = torch.bincount(values.flatten(), minlength=256).double()
    levels = torch.arange(256, dtype=torch.float64)
    mean = (counts * levels).sum() / counts.sum()
    return float(mean), float(((counts * (levels - mean) ** 2).sum() / counts.sum()).sqrt())


_SHIFT, _FLIP, _CROP = 0, 1, 2  # one stream of random numbers each
_WIDEST = 4 / 3  # width to height of a crop, and the inverse


def shift(images: Tensor, draws: KeyedRandom, reach: int) -> Tensor:
    """Shift images (n, C, H, W) by up to `reach` pixels: a random crop of the image padded with 0 (He et al. 2015)."""
    return _move(images, draws.uniform(_SHIFT, 2), reach)


def shift_and_mirror(images: Tensor, draws: KeyedRandom, reach: int) -> Tensor:
    """`shift`, and a flip left to right with probability ½; their random numbers are drawn in one call."""
    drawn = draws.uniform_streams((_SHIFT, 2), (_FLIP, 1))
    return _flip(_move(images, drawn[:, :2], reach), drawn[:, 2:])


def random_resized_crop(images: Tensor, draws: KeyedRandom, smallest: float) -> Tensor:
    """Cut a rectangle out of each image (n, C, H, W), and resize it to the size of the image.

    Its area is `smallest` to 1 of the image's, its width 3/4 to 4/3 of its height before it is cut to the image, as
    torchvision's RandomResizedCrop (Szegedy et al. 2015).
    """
    area, shape, across, down = draws.uniform(_CROP, 4).unbind(1)
    area, shape = smallest + (1 - smallest) * area, _WIDEST ** (2 * shape - 1)
    wide, high = (area * shape).sqrt().clamp(max=1), (area / shape).sqrt().clamp(max=1)
    theta = torch.zeros(len(images), 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 1, 1] = wide, high
    theta[:, 0, 2], theta[:, 1, 2] = (1 - wide) * (2 * across - 1), (1 - high) * (2 * down - 1)
    grid = torch.nn.functional.affine_grid(theta, list(images.shape), align_corners=False)
    found = torch.nn.functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return found.to(images.dtype) if images.is_floating_point() else found.round_().to(images.dtype)


def _move(images: Tensor, drawn: Tensor, reach: int) -> Tensor:
    n, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (reach,) * 4)
    runs = padded.flatten().unfold(0, width, 1)  # every run of W pixels, a view; a row of the result is one of them
    down, right = (drawn * (2 * reach + 1)).long().unbind(1)
    corner = down.mul_(padded.shape[-1]).add_(right)
    start = _rows(n * channels, height, *padded.shape[-2:], images.device).view(n, -1) + corner[:, None]
    return runs.index_select(0, start.flatten()).view(images.shape)


@lru_cache(maxsize=8)
def _rows(planes: int, height: int, tall: int, wide: int, device: torch.device) -> Tensor:
    """(planes, height) int64: where the rows of each padded plane begin; cached, since every batch needs it."""
    first = torch.arange(planes, device=device)[:, None] * tall
    return (first + torch.arange(height, device=device)) * wide


def _flip(images: Tensor, drawn: Tensor) -> Tensor:
    mirror, images = (drawn[:, 0] < 0.5).view(-1, 1, 1, 1), images.contiguous()
    mirrored = images.flip(-1)
    if images.shape[-1] * images.element_size() % 8:
        return torch.where(mirror, mirrored, images)
    # Eight bytes at a time: where the two differ, take the mirrored bits. `torch.where` broadcasts slowly.
    eights, found = images.view(torch.int64), mirrored.view(torch.int64)
    return found.bitwise_xor_(eights).bitwise_and_(-mirror.long()).bitwise_xor_(eights).view(images.dtype)


_BITS, _PHOTOMETRIC = 258, 262  # tags of TIFF
IMAGENET = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)  # mean and deviation of ImageNet's pixels, red green blue


def check_pillow(name: str) -> None:
    """Refuse the dataset `name`, of images, where Pillow is not installed."""
    import_extra("PIL", f"--data {name} needs Pillow", "pip install pillow, or this program with its extra [images]")


def choose_shorter_side(size: int, resize: int | None) -> int:
    """Return the shorter side in pixels before a square of `size` is cropped; RequestError if `resize` is smaller."""
    if resize is not None and resize < size:
        raise RequestError(f"data.args.resize: {resize} pixels", remedy=f"a whole number of at least {size}")
    return resize or size * 8 // 7


def decode_image(file: Path | bytes, shorter: int, where: str) -> np.ndarray:
    """Return the pixels (height, width, 3) uint8, upright, the shorter side resized; messages name the image `where`.

    Raises RequestError if the image is damaged, or if its black and white are unknown.
    """
    return resize_pixels(read_colors(file, where, shorter), shorter)


FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
"""Pillow's names of the formats that images may have. Its others include EPS, for which it starts Ghostscript."""


@contextmanager
def open_image(file: Path | bytes, where: str) -> Iterator[Any]:  # an Image of Pillow
    """Open an image lazily; an error of Pillow, also inside the block, becomes one of ours that names `where`.

    The content decides the format, which is one of FORMATS, whatever the name ends in.
    """
    from PIL import Image  # an extra, and not for those who bring no images

    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as opened:
            yield opened
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        remedy = f"repair or remove it; formats that are read: {', '.join(FORMATS)}"
        raise explain_unreadable(f"{where} is not a readable image ({error})", error, remedy) from error


def read_colors(file: Path | bytes, where: str, shorter: int = 0) -> Any:
    """Return an upright RGB image of Pillow, 8 bits a channel: the first frame, colors as if nothing were transparent.

    A JPEG is decoded at a fraction of its size if its shorter side keeps `shorter` pixels; 0: at its size.
    """
    from PIL import Image, ImageOps

    with open_image(file, where) as opened:
        if shorter:
            opened.draft("RGB", (shorter, shorter))
        image = ImageOps.exif_transpose(opened)
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            # Pillow's own conversion clips these at 255, so that 16 bits become white, and floats up to 1 black
            tags = getattr(opened, "tag_v2", {})
            image = Image.fromarray(_scale_to_bytes(np.asarray(image), image.mode, tags, where))
        return image.convert("RGB")


def _scale_to_bytes(values: np.ndarray, mode: str, tags: Mapping[int, Any], where: str) -> np.ndarray:
    """Scale the gray values (h, w) of a mode with more than 8 bits to uint8; RequestError if their range is unknown.

    Integers lose their low bits, as those of Pillow's 16-bit RGB do. `tags` are those of a TIFF.
    """
    low, high, bits = values.min(), values.max(), 16 if mode == "I" else tags.get(_BITS, (16,))[0]
    # a TIFF of 32 bits whose values fit into 8 would turn black if it were taken for one of 16; PGM in mode I has 16
    known = high < 2**bits and not (mode == "I" and tags and 0 < high < 256)
    if not (low >= 0 and (high <= 1 if mode == "F" else known)):
        problem = (
            f"{where} has values from {low} to {high} (mode {mode} of Pillow): which are black and white is unknown"
        )
        raise RequestError(problem, remedy="save it with 8 or 16 bits a channel, or with floats from 0 to 1 for white")
    if mode == "F":
        scaled = (values * 255).round()
    else:  # TIFF's photometric 0 means that white is zero: Pillow inverts only 8 bits
        scaled = (2**bits - 1 - values if tags.get(_PHOTOMETRIC) == 0 else values) >> (bits - 8)
    return scaled.astype(np.uint8)


def resize_pixels(image: Any, shorter: int) -> np.ndarray:
    """Return the pixels (height, width, …), the shorter side resized; bilinear, but class numbers (mode I) nearest."""
    scale = shorter / min(image.size)
    width, height = (max(shorter, round(side * scale)) for side in image.size)
    return np.asarray(image.resize((width, height), 0 if image.mode == "I" else 2))


def cut_square(pixels: np.ndarray, size: int, *, augment: bool) -> Tensor:
    """(3, size, size) bytes from the middle; or from anywhere and half of the time mirrored, by Python's generator."""
    spare = [pixels.shape[0] - size, pixels.shape[1] - size]
    top, left = [random.randint(0, room) if augment else room // 2 for room in spare]
    cut = pixels[top : top + size, left : left + size]
    if augment and random.random() < 0.5:
        cut = cut[:, ::-1]
    return torch.from_numpy(np.ascontiguousarray(cut.transpose(2, 0, 1)))


class BatchTransforms:
    """The transforms of a split's batches: the dataset's own, and for the training split what the settings ask for."""

    def __init__(
        self, config: DataConfig, source: DataSource, seed: int, device: torch.device, *, training: bool
    ) -> None:
        self._prepare, self._seed, self._device = source.prepare, seed, device
        self._augments: list[Callable[[Tensor, KeyedRandom], Tensor]] = [source.augment] if source.augment else []
        smallest = config.random_resized_crop if training else None
        self._needs_images = smallest is not None
        if smallest is not None:
            self._augments.append(partial(random_resized_crop, smallest=smallest))
        self._rand_augment = None
        if training and config.rand_augment is not None:
            name = str(config.rand_augment)
            found = find_factory(name, {name: TRANSFORMS["rand_augment"]}, flag="data.rand_augment")
            self._rand_augment = found(config.rand_augment)
        self._mixer = None
        if training and (config.mixup or config.cutmix):
            self._mixer = load(TRANSFORMS["mix"])(config.mixup, config.cutmix, source.num_classes)
        self.draws = bool(self._augments or self._rand_augment or self._mixer)  # random numbers for each batch

    def prepare_stored(self, stored: Any) -> Any:
        """A whole split ahead of its batches, if that takes no more memory, and gives the same bits."""
        prepare, in_place = self._prepare, isinstance(stored, Tensor) and stored.dtype == torch.float32
        if self.draws or not in_place or not isinstance(prepare, Standardised) or prepare.mode == "average":
            return stored
        self._prepare = lambda prepared: prepared
        return prepare(stored)

    def evaluate(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """A batch as it is evaluated; one of the training split, the first of a run, must fit the settings."""
        if self._needs_images and not (isinstance(inputs, Tensor) and inputs.ndim == 4):
            problem = f"data.random_resized_crop: inputs are {describe_shapes(inputs)}"
            raise RequestError(problem, remedy="images (channels, height, width)")
        if self._rand_augment:
            self._rand_augment.check(inputs)
        inputs = self._to_model_input(inputs)
        if self._mixer:
            self._mixer.check(inputs, targets)
        return inputs, targets

    def train(self, inputs: Any, targets: Any, keys: Tensor, epoch: int, micro_batch: int) -> tuple[Any, Any]:
        """A batch that is trained on; random numbers are drawn by `keys`, (n,) int64 on the CPU.

        `micro_batch` samples are a micro-batch, several of which may have been joined.
        """
        if not self.draws:
            return self._to_model_input(inputs), targets
        draws = KeyedRandom(self._seed, epoch, to_device(keys, self._device))
        if isinstance(inputs, Tensor):
            for augment in self._augments:
                inputs = augment(inputs, draws)
            if self._rand_augment:
                inputs = self._rand_augment(inputs, KeyedRandom(self._seed, epoch, keys))
        inputs = self._to_model_input(inputs)
        return self._mixer(inputs, targets, draws, micro_batch) if self._mixer else (inputs, targets)

    def _to_model_input(self, inputs: Any) -> Any:
        return self._prepare(inputs) if isinstance(inputs, Tensor) else inputs
