"""RandAugment: torchvision's operations, as a function of seed, epoch and sample."""

import sys
from collections import Counter
from importlib.abc import MetaPathFinder

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

import main_multi_gpu
from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.images.augment import RandAugment
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import BatchPlan
from tests.models.test_torchvision_networks import forget_packages
from tests.support.world import CPU

IMAGES = torch.randint(256, (60, 3, 14, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(IMAGES, torch.arange(60))
SOURCE = DataSource(train=DATA, val=DATA, test=None, input_shape=(3, 14, 11), num_classes=60)


def apply_torchvision(image: Tensor, operation: str, magnitude: int) -> set[bytes]:
    """What its RandAugment makes of an image with this operation, for either sign."""
    augment = v2.RandAugment(num_ops=1, magnitude=magnitude)
    augment._AUGMENTATION_SPACE = {operation: v2.RandAugment._AUGMENTATION_SPACE[operation]}
    with torch.random.fork_rng(devices=[]):
        return {augment(image).numpy().tobytes() for _ in range(20)}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("magnitude", [0, 9, 23])
def test_the_operations_are_torchvisions_and_equally_frequent(channels: int, magnitude: int) -> None:
    image = IMAGES[0, :channels]
    choices = RandAugment(magnitude)._choices
    ours = [apply(image[None], level)[0].numpy().tobytes() for apply, level in choices]
    theirs = [apply_torchvision(image, each, magnitude) for each in v2.RandAugment._AUGMENTATION_SPACE]
    assert len(ours) == 2 * len(theirs)
    for first, second, expected in zip(ours[::2], ours[1::2], theirs, strict=True):
        assert {first, second} == expected


def test_each_image_gets_two_at_random() -> None:
    class Noting(RandAugment):
        """Counts up where an operation is applied, by which one it is."""

        def __init__(self) -> None:
            self._choices = [(lambda images, level: images * 28 + int(level), number) for number in range(28)]

    count = 28_000
    noted = Noting()(torch.zeros(count, 1, 1, 1, dtype=torch.int64), KeyedRandom(1, 0, torch.arange(count))).flatten()
    for chosen in (noted // 28, noted % 28):
        frequent = Counter(chosen.tolist())
        assert len(frequent) == 28
        assert min(frequent.values()) > 850
        assert max(frequent.values()) < 1150
    assert 0.8 < float((noted // 28 % 2 == noted % 2).float().mean()) * 2 < 1.2, "one does not follow from the other"


def test_it_follows_seed_epoch_and_sample_and_leaves_other_random_numbers_alone() -> None:
    augment, before = RandAugment(9), torch.get_rng_state()
    found = augment(IMAGES, KeyedRandom(1, 2, torch.arange(60)))
    assert torch.equal(augment(IMAGES[40:], KeyedRandom(1, 2, torch.arange(40, 60))), found[40:])
    for other in (KeyedRandom(1, 3, torch.arange(60)), KeyedRandom(2, 2, torch.arange(60))):
        assert (augment(IMAGES, other) == found).flatten(1).all(1).float().mean() < 0.5
    assert torch.equal(torch.get_rng_state(), before)
    assert (found.dtype, found.shape) == (IMAGES.dtype, IMAGES.shape)


def test_any_number_of_workers_sees_the_same_images_and_each_epoch_others() -> None:
    def serve(workers: int, epoch: int) -> dict[int, Tensor]:
        plan = BatchPlan(samples=60, micro_batch=5, global_batch=20, workers=workers)
        loaders = [Loader(DATA, SOURCE, DataConfig(rand_augment=9), device=CPU, seed=3) for _ in range(workers)]
        epochs = [loader.epoch(plan, epoch, 0, rank, 1) for rank, loader in enumerate(loaders)]
        batches: list[Batch] = [batch for steps in epochs for _, work in steps for batch in work]
        return {int(number): one for batch in batches for number, one in zip(batch.targets, batch.inputs, strict=True)}

    one, two, later = serve(1, 0), serve(2, 0), serve(1, 1)
    assert one.keys() == two.keys() == later.keys() == set(range(60))
    assert all(torch.equal(one[number], two[number]) for number in one)
    assert sum(torch.equal(one[number], later[number]) for number in one) < 20
    assert sum(torch.equal(one[number], IMAGES[number] / 255) for number in one) < 20


def test_evaluations_see_the_images_as_they_are() -> None:
    loader = Loader(DATA, SOURCE, DataConfig(rand_augment=9), device=CPU, seed=3)
    assert torch.equal(next(loader.eval_batches(60, 0, 1)).inputs, IMAGES / 255)


@pytest.mark.parametrize("images", [IMAGES.float() / 255, IMAGES[:, :2], IMAGES[:, 0], {"x": IMAGES}])
def test_what_is_no_image_of_bytes_is_refused(images: object) -> None:
    with pytest.raises(RequestError, match=r"data\.rand_augment: inputs are .*(float32|uint8)") as refused:
        RandAugment(9).check(images)
    assert "uint8" in refused.value.remedy


class Missing(MetaPathFinder):
    """There is no torchvision."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torchvision":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def test_without_torchvision_it_names_the_setting_and_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_tmp_path: None
) -> None:
    with forget_packages(), monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
        patch.delitem(sys.modules, "multigpu_cli.data.images.augment")
        assert main_multi_gpu.run(["--set", "data.rand_augment=9", "--dry-run"]) == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error == "error: data.rand_augment 9: the package torchvision is not installed"
    assert remedy.strip() == "try: pip install 'multigpu-cli[vision]'"
