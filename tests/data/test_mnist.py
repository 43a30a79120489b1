import gzip
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from multigpu_cli.data.builtin.small_images import fashion_mnist, mnist
from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.errors import RequestError

REAL = Path(os.environ.get("MULTIGPU_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "fashion-mnist"


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(folder, *, zipped=False, spelling="-idx"):
    """A small MNIST: 100 training and 20 test images."""
    numbers = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 100), ("t10k", 20)):
        images = numbers.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(count, dtype=np.uint8) % 10)):
            file = folder / (f"{part}-{name}-ubyte".replace("-idx", spelling) + (".gz" if zipped else ""))
            file.write_bytes(gzip.compress(idx(array), 1) if zipped else idx(array))
    return folder


def test_images_keep_their_labels_and_stay_bytes(tmp_path):
    source: Any = mnist(str(write(tmp_path)), "flatten", seed=1)
    assert [len(part) for part in (source.train, source.val, source.test)] == [90, 10, 20]
    content = np.frombuffer((tmp_path / "t10k-images-idx3-ubyte").read_bytes(), np.uint8)[16:].reshape(-1, 1, 28, 28)
    assert torch.equal(source.test.tensors[0], torch.from_numpy(content.copy()))
    assert source.test.tensors[1].tolist() == [*range(10), *range(10)]
    assert source.test.tensors[0].dtype == torch.uint8
    assert source.test.tensors[0].is_contiguous()
    assert source.input_shape == (1, 28, 28)
    assert source.num_classes == 10


@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw"])
@pytest.mark.parametrize(("zipped", "spelling"), [(False, "-idx"), (True, "-idx"), (False, ".idx")])
def test_gzipped_or_not_in_the_folders_of_the_wild(tmp_path, place, zipped, spelling):
    write(tmp_path / place, zipped=zipped, spelling=spelling)
    source: Any = mnist(str(tmp_path), "flatten", seed=1)
    assert len(source.test) == 20


def test_the_validation_part_is_chosen_by_seed(tmp_path):
    first, second = (mnist(str(write(tmp_path)), "flatten", seed).val for seed in (1, 2))
    assert isinstance(first, TensorDataset)
    assert isinstance(second, TensorDataset)
    assert not torch.equal(first.tensors[0], second.tensors[0])


def test_fashion_mnist_has_its_own_names_and_mirrors(tmp_path):
    source: Any = fashion_mnist(str(write(tmp_path)), "flatten", seed=1)
    assert source.class_names[0] == "T-shirt/top"
    assert source.class_names[9] == "Ankle boot"
    images = source.train.tensors[0]
    draws = KeyedRandom(1, 0, torch.arange(len(images)))
    plain: Any = mnist(str(tmp_path), "flatten", seed=1)
    mirrored = (source.augment(images, draws) == plain.augment(images, draws).flip(-1)).flatten(1).all(1)
    assert 25 < mirrored.sum() < 65


def test_a_missing_dataset_says_where_it_looked_and_how_to_get_it(tmp_path):
    for missing in (None, str(tmp_path), str(tmp_path / "nowhere")):
        with pytest.raises(RequestError, match="--data-dir") as refused:
            fashion_mnist(missing, "flatten", seed=1)
        assert "zalandoresearch" in refused.value.remedy
        assert "t10k-labels-idx1-ubyte" in refused.value.remedy
    assert str(tmp_path / "nowhere" / "FashionMNIST" / "raw") in refused.value.problem


def damage(content):
    return {
        "does not begin like an IDX file": b"\x00\x00\x0d" + content[3:],
        "its header": content[:-1],
        "means": content + b"\x00",
    }


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_damage_is_told_with_the_files_name(tmp_path, name):
    file = write(tmp_path) / name
    for fault, content in damage(file.read_bytes()).items():
        file.write_bytes(content)
        with pytest.raises(RequestError, match=fault) as refused:
            mnist(str(tmp_path), "flatten", seed=1)
        assert str(file) in refused.value.problem
    file.unlink()
    with pytest.raises(RequestError, match=r"is missing|looked for"):
        mnist(str(tmp_path), "flatten", seed=1)


@pytest.mark.parametrize(
    ("name", "array", "fault"),
    [
        ("t10k-labels-idx1-ubyte", np.full(20, 10, np.uint8), "label 10 of sample 1"),
        ("t10k-labels-idx1-ubyte", np.zeros(19, np.uint8), "has 19 labels where t10k-images-idx3-ubyte has 20"),
        ("t10k-images-idx3-ubyte", np.zeros((20, 32, 32), np.uint8), "images of 32×32"),
        ("t10k-images-idx3-ubyte", np.zeros((0, 28, 28), np.uint8), "0, 28, 28"),
    ],
)
def test_contents_that_do_not_fit_are_refused(tmp_path, name, array, fault):
    (write(tmp_path) / name).write_bytes(idx(array))
    with pytest.raises(RequestError, match=fault) as refused:
        mnist(str(tmp_path), "flatten", seed=1)
    assert str(tmp_path / name) in refused.value.problem


def test_a_header_that_promises_terabytes_allocates_nothing(tmp_path):
    (write(tmp_path) / "train-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3]) + b"\xff" * 12)
    with pytest.raises(RequestError, match="has 16 bytes"):
        mnist(str(tmp_path), "flatten", seed=1)


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-20], lambda whole: whole[:50] + b"\x55\xaa" * 50 + whole[150:]]
)
def test_a_damaged_archive_is_refused(tmp_path, damage):
    file = write(tmp_path, zipped=True) / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(RequestError, match="damaged or cut short") as refused:
        mnist(str(tmp_path), "flatten", seed=1)
    assert str(file) in refused.value.problem


@pytest.mark.skipif(
    not REAL.is_dir(), reason=f"Fashion-MNIST is not in {REAL} (MULTIGPU_TEST_DATA names the folder above)"
)
def test_the_real_fashion_mnist():
    source: Any = fashion_mnist(str(REAL), "flatten", seed=1)
    assert [len(part) for part in (source.train, source.val, source.test)] == [54_000, 6_000, 10_000]
    assert source.test.tensors[1].bincount().tolist() == [1000] * 10
    met = source.prepare(source.train.tensors[0][:2000])
    assert abs(met.mean()) < 0.02
    assert abs(met.std() - 1) < 0.02
