from functools import partial

import pytest
import torch

from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.data.transforms import random_resized_crop, shift, shift_and_mirror

INDICES = torch.arange(200)
mirror = partial(shift_and_mirror, reach=0)
IMAGES = torch.randint(1, 256, (200, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_each_image_is_shifted_as_a_whole_and_all_shifts_occur():
    moved = shift(IMAGES, KeyedRandom(1, 0, INDICES), reach=1)
    assert moved.dtype == torch.uint8
    assert moved.shape == IMAGES.shape
    padded = torch.nn.functional.pad(IMAGES, (1, 1, 1, 1))
    candidates = [padded[:, :, down : down + 6, right : right + 5] for down in range(3) for right in range(3)]
    hits = torch.stack([(moved == candidate).flatten(1).all(1) for candidate in candidates])
    assert hits.sum(0).eq(1).all()
    assert hits.any(1).all()


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("width", [5, 16])
def test_about_half_are_mirrored_and_the_rest_untouched(width: int, kind: torch.dtype) -> None:
    """Rows of whole eights of bytes, which are picked by their bits, and others."""
    images = torch.rand(200, 3, 6, width, generator=torch.Generator().manual_seed(0)).mul(255).to(kind)
    before = images.clone()
    flipped = mirror(images, KeyedRandom(1, 0, INDICES))
    assert torch.equal(images, before)
    turned = (flipped == images.flip(-1)).flatten(1).all(1)
    same = (flipped == images).flatten(1).all(1)
    assert (turned ^ same).all()
    assert 70 < turned.sum() < 130
    across = images.to(memory_format=torch.channels_last)
    assert torch.equal(mirror(across, KeyedRandom(1, 0, INDICES)), flipped)


def test_a_sample_is_augmented_alike_in_any_batch_and_differently_in_another_epoch():
    whole = shift_and_mirror(IMAGES, KeyedRandom(1, 0, INDICES), reach=2)
    some = torch.tensor([150, 3, 77])
    assert torch.equal(shift_and_mirror(IMAGES[some], KeyedRandom(1, 0, some), reach=2), whole[some])
    assert not torch.equal(shift_and_mirror(IMAGES, KeyedRandom(1, 1, INDICES), reach=2), whole)


def test_shift_and_mirror_do_not_share_their_random_numbers():
    up = (
        shift(IMAGES, KeyedRandom(1, 0, INDICES), reach=1)[:, :, 0].eq(0).flatten(1).all(1)
    )  # moved down: empty first row
    turned = (mirror(IMAGES, KeyedRandom(1, 0, INDICES)) == IMAGES.flip(-1)).flatten(1).all(1)
    assert 0.2 < turned[up].float().mean() < 0.8


def test_a_resized_crop_is_a_part_of_the_image() -> None:
    """Of a picture whose pixels say where they are: a rectangle of the right area and shape, anywhere within."""
    side, count = 64, 500
    across = torch.linspace(0, 1, side).expand(side, side)
    images = torch.stack([across, across.T]).expand(count, 2, side, side).contiguous()
    cut = random_resized_crop(images, KeyedRandom(1, 0, torch.arange(count)), smallest=0.25)
    wide, high = cut[:, 0, 0, -1] - cut[:, 0, 0, 0], cut[:, 1, -1, 0] - cut[:, 1, 0, 0]
    area, shape = wide * high, wide / high
    assert 0.2 < float(area.min()) < 0.3
    assert 0.9 < float(area.max()) <= 1
    assert 0.7 < float(shape.min()) < 0.8
    assert 1.25 < float(shape.max()) < 1.4
    assert float(cut[:, 0, 0, 0].min()) < 0.02
    assert float(cut[:, 0, 0, -1].max()) > 0.98
    assert float(cut[:, 0, 0, 0].max()) > 0.35


def test_resized_crops_keep_bytes_and_follow_the_sample() -> None:
    images = torch.randint(256, (6, 3, 9, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    cut = random_resized_crop(images, KeyedRandom(1, 2, torch.arange(6)), smallest=0.3)
    assert (cut.dtype, cut.shape) == (torch.uint8, images.shape)
    alone = random_resized_crop(images[4:], KeyedRandom(1, 2, torch.arange(4, 6)), smallest=0.3)
    assert torch.equal(cut[4:], alone)
    assert not torch.equal(cut, random_resized_crop(images, KeyedRandom(1, 3, torch.arange(6)), smallest=0.3))
    whole = random_resized_crop(images[:, :, :7], KeyedRandom(1, 2, torch.arange(6)), smallest=1.0)
    assert whole.shape == (6, 3, 7, 7)
