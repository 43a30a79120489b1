import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multigpu_cli.data.builtin.har import SIGNALS, load
from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.errors import RequestError

REAL = (
    Path(os.environ.get("MULTIGPU_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "har" / "uci-har.tar.xz"
)
SUBJECTS = {"train": [1, 1, 3, 3, 3, 5, 7, 7], "test": [2, 2, 4]}


def write(folder):
    """A small UCI HAR in the original layout and number format; each value says its window, channel and time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "activity_labels.txt").write_text("1 WALKING\n2 SITTING\n3 LAYING\n")
    for part, subjects in SUBJECTS.items():
        inner = folder / part / "Inertial Signals"
        inner.mkdir(parents=True)
        (folder / part / f"subject_{part}.txt").write_text("".join(f"{subject}\n" for subject in subjects))
        labels = [1 + number % 3 for number in range(len(subjects))]
        (folder / part / f"y_{part}.txt").write_text("".join(f"{label}\n" for label in labels))
        for channel, signal in enumerate(SIGNALS):
            windows = value(np.arange(len(subjects))[:, None], channel, np.arange(128)[None])
            lines = ("".join(f"{number: 16.7e}" for number in window) + "\r\n" for window in windows)
            (inner / f"{signal}_{part}.txt").write_text("".join(lines), newline="")
    return folder


def value(window, channel, time):
    return window - 0.1 * channel + 0.001 * time


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "UCI HAR Dataset")


def small(data_dir, mode="flatten", seed=1, **args):
    return load(str(data_dir), mode, seed, **{"val_subjects": 1, **args})


def test_the_nine_signals_are_the_channels_in_their_fixed_order(folder):
    source = small(folder)
    signals, labels = source.test.tensors
    expected = value(np.arange(3)[:, None, None], np.arange(9)[:, None], np.arange(128))
    torch.testing.assert_close(signals, torch.from_numpy(expected.astype(np.float32)))
    assert signals.is_contiguous()
    assert labels.tolist() == [0, 1, 2]
    assert source.class_names == ("WALKING", "SITTING", "LAYING")
    assert SIGNALS[3:7] == ("body_gyro_x", "body_gyro_y", "body_gyro_z", "total_acc_x")


def test_the_parent_folder_will_do(folder):
    assert len(small(folder.parent).test) == 3


def test_validation_holds_whole_subjects(folder):
    windows = {}
    for seed in range(6):
        source = small(folder, seed=seed)
        held_out = source.val.tensors[0][:, 0, 0].round().int().tolist()
        assert sorted(held_out + source.train.tensors[0][:, 0, 0].round().int().tolist()) == list(range(8))
        subjects = {SUBJECTS["train"][window] for window in held_out}
        assert len(subjects) == 1
        assert len(held_out) == SUBJECTS["train"].count(*subjects)
        windows[seed] = tuple(held_out)
    assert len(set(windows.values())) > 1


@pytest.mark.parametrize(("mode", "shape"), [("flatten", (9, 128)), ("average", (1, 128)), ("first", (1, 128))])
def test_modes_and_statistics_of_the_training_part_alone(folder, mode, shape):
    source = small(folder, mode)
    met = source.prepare(source.train.tensors[0])
    assert source.input_shape == shape == met.shape[1:]
    assert abs(met.mean()) < 1e-4
    assert abs(source.prepare(source.val.tensors[0]).mean()) > 0.1


def test_augmentation_turns_all_three_sensors_alike_and_keeps_lengths():
    from multigpu_cli.data.builtin.har import _rotate_and_scale

    signals = torch.randn(40, 9, 16, generator=torch.Generator().manual_seed(0))
    turned = _rotate_and_scale(signals, KeyedRandom(1, 0, torch.arange(40)), rotation=30.0, scaling=0.0)
    before, after = (batch.view(40, 3, 3, 16).movedim(1, 2).reshape(40, 3, 48) for batch in (signals, turned))
    torch.testing.assert_close(after.norm(dim=1), before.norm(dim=1))
    rotations = torch.linalg.lstsq(before.mT, after.mT).solution.mT  # one matrix explains all three sensors
    torch.testing.assert_close(rotations @ before, after, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.linalg.det(rotations), torch.ones(40), atol=1e-4, rtol=0)
    angles = torch.rad2deg(torch.arccos((rotations.diagonal(dim1=1, dim2=2).sum(1) - 1) / 2))
    assert 10 < angles.mean() < 40
    assert angles.max() < 60


def test_augmentation_scales_within_its_share_and_can_be_left_out(folder):
    source = small(folder, rotation=0, scaling=0.1)
    signals = source.train.tensors[0] + 10
    ratio = source.augment(signals, KeyedRandom(1, 0, torch.arange(len(signals)))) / signals
    assert 0.9 <= ratio.min() < ratio.max() <= 1.1
    torch.testing.assert_close(ratio[:, 2, 3], ratio[:, 7, 100])
    assert small(folder, rotation=0, scaling=0).augment is None


def test_a_sample_is_augmented_alike_in_any_batch(folder):
    source = small(folder)
    signals = torch.randn(50, 9, 128)
    whole = source.augment(signals, KeyedRandom(1, 3, torch.arange(50)))
    some = torch.tensor([31, 2, 44])
    assert torch.equal(source.augment(signals[some], KeyedRandom(1, 3, some)), whole[some])
    assert not torch.equal(source.augment(signals, KeyedRandom(1, 4, torch.arange(50))), whole)


def test_a_missing_dataset_says_where_it_looked_and_how_to_get_it(tmp_path):
    for missing in (None, str(tmp_path), str(tmp_path / "nowhere")):
        with pytest.raises(RequestError, match="--data-dir") as refused:
            load(missing, "flatten", seed=1)
        assert "archive.ics.uci.edu" in refused.value.remedy
        assert "Inertial Signals" in refused.value.remedy
    assert str(tmp_path / "nowhere" / "UCI HAR Dataset") in refused.value.problem


@pytest.mark.parametrize(
    ("name", "old", "new", "fault"),
    [
        ("test/Inertial Signals/body_gyro_y_test.txt", "\r\n", "  1.0\r\n", "129"),
        ("test/Inertial Signals/body_gyro_y_test.txt", "-4.0000000e-01", "           nan", "line 1 holds NaN"),
        ("test/Inertial Signals/body_gyro_y_test.txt", "-4.0000000e-01", " somewhere    ", "somewhere"),
        ("train/y_train.txt", "3\n", "4\n", "label 4 of sample 3 is not one of 1 … 3"),
        ("train/y_train.txt", "3\n", "2.5\n", "whole number"),
        ("train/subject_train.txt", "5\n", "", "has 7 lines where y_train.txt has 8"),
        ("activity_labels.txt", "2 SITTING\n", "", "numbered from 1"),
    ],
)
def test_damage_is_told_with_the_files_name(folder, name, old, new, fault):
    file = folder / name
    text = file.read_bytes().decode()
    assert old in text
    file.write_text(text.replace(old, new, 1 if "nan" in new or "some" in new else -1), newline="")
    with pytest.raises(RequestError, match=fault) as refused:
        small(folder)
    assert str(file) in refused.value.problem


@pytest.mark.parametrize("length", [0, 100, 4100])
def test_a_file_cut_short_is_refused(folder, length):
    file = folder / "train" / "Inertial Signals" / "total_acc_z_train.txt"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(RequestError) as refused:
        small(folder)
    assert str(file) in refused.value.problem


def test_a_file_that_is_not_there_is_named(folder):
    file = folder / "test" / "Inertial Signals" / "total_acc_z_test.txt"
    file.unlink()
    with pytest.raises(RequestError, match="is missing") as refused:
        small(folder)
    assert str(file) in refused.value.problem


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason=f"UCI HAR is not in {REAL} (MULTIGPU_TEST_DATA names the folder above)")
def test_the_real_uci_har(tmp_path):
    with tarfile.open(REAL) as archive:
        archive.extractall(tmp_path, filter="data")
    source: Any = load(str(tmp_path), "flatten", seed=1)
    assert len(source.train) + len(source.val) == 7352
    assert len(source.test) == 2947
    assert source.test.tensors[1].bincount().tolist() == [496, 471, 420, 491, 532, 537]
    assert source.class_names[5] == "LAYING"
    gravity = source.train.tensors[0][:, 6].mean()
    assert 0.7 < gravity < 0.9  # the phone stood upright, in units of g
