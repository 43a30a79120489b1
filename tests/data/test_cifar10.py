from typing import Any

import numpy as np
import pytest
import torch

from multigpu_cli.data.builtin.small_images import cifar10 as load
from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.errors import RequestError

FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
PER_FILE = 20


@pytest.fixture
def folder(tmp_path):
    """A small CIFAR-10 in the original layout."""
    inner = tmp_path / "cifar-10-batches-bin"
    inner.mkdir()
    numbers = np.random.default_rng(0)
    for name in FILES:
        records = numbers.integers(0, 256, (PER_FILE, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(PER_FILE) % 10
        (inner / name).write_bytes(records.tobytes())
    return inner


def test_records_become_images_with_their_labels(folder):
    source: Any = load(str(folder), "flatten", seed=1)
    assert [len(part) for part in (source.train, source.val, source.test)] == [90, 10, PER_FILE]
    record = np.frombuffer((folder / "test_batch.bin").read_bytes(), np.uint8)[3073 * 3 : 3073 * 4]
    image, label = source.test[3]
    assert label == record[0] == 3
    assert image.dtype == torch.uint8
    assert image[1, 2, 5] == record[1 + 1024 + 2 * 32 + 5]  # green, third row, sixth column
    assert source.train.tensors[0].is_contiguous()


def test_the_parent_folder_will_do_and_the_test_file_is_never_trained_on(folder):
    source: Any = load(str(folder.parent), "flatten", seed=1)
    trained = {image.numpy().tobytes() for part in (source.train, source.val) for image in part.tensors[0]}
    assert len(trained) == 5 * PER_FILE
    assert not trained & {image.numpy().tobytes() for image in source.test.tensors[0]}


@pytest.mark.parametrize(
    ("mode", "shape"), [("flatten", (3, 32, 32)), ("average", (1, 32, 32)), ("first", (1, 32, 32))]
)
def test_modes(folder, mode, shape):
    source: Any = load(str(folder), mode, seed=1)
    assert source.input_shape == shape == source.prepare(source.train.tensors[0][:2]).shape[1:]


def test_statistics_come_from_the_training_part_alone(folder):
    source: Any = load(str(folder), "flatten", seed=1)
    met = source.prepare(source.train.tensors[0])
    torch.testing.assert_close(met.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    assert source.prepare(source.test.tensors[0]).mean((0, 2, 3)).abs().max() > 1e-4


def test_augmentation_crops_and_mirrors_training_images(folder):
    source: Any = load(str(folder), "flatten", seed=1)
    images = source.train.tensors[0][:50]
    assert source.augment(images, KeyedRandom(1, 0, torch.arange(50))).shape == images.shape
    assert load(str(folder), "flatten", seed=1, augment=False).augment is None


def test_a_missing_dataset_says_where_it_looked_and_how_to_get_it(tmp_path):
    for missing in (None, str(tmp_path), str(tmp_path / "nowhere")):
        with pytest.raises(RequestError, match="--data-dir") as refused:
            load(missing, "flatten", seed=1)
        assert "cifar-10-binary.tar.gz" in refused.value.remedy
        assert "data_batch_1.bin" in refused.value.remedy
    assert str(tmp_path / "nowhere" / "cifar-10-batches-bin") in refused.value.problem


@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
def test_damage_is_told_with_the_files_name(folder, name):
    file = folder / name
    whole = file.read_bytes()
    broken = {
        "not a whole number of records": whole[:-1],
        "has 19 images where": whole[:-3073],
        "0 bytes": b"",
        "label 10 of sample 2": whole[:3073] + b"\x0a" + whole[3074:],
    }
    for fault, content in broken.items():
        file.write_bytes(content)
        with pytest.raises(RequestError, match=fault) as refused:
            load(str(folder), "flatten", seed=1)
        assert str(file) in refused.value.problem
    file.unlink()
    with pytest.raises(RequestError, match="is missing") as refused:
        load(str(folder), "flatten", seed=1)
    assert str(file) in refused.value.problem
