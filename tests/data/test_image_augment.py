import pytest
import torch

from multigpu_cli.data.image_augment import mirror, shift, shift_and_mirror
from multigpu_cli.data.keyed_random import KeyedRandom

INDICES = torch.arange(200)
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
