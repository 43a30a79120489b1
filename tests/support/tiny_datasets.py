"""Datasets of a few made-up samples in the file formats of the real ones, for tests that only need them to be read."""

import json
import struct
from pathlib import Path

import numpy as np

_HAR_LABELS = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")


def har(folder: Path) -> Path:
    """UCI HAR's folder: 6 windows of each of 10 subjects to train on, 6 of each of 2 to test."""
    draws = np.random.default_rng(0)
    folder.mkdir(parents=True)
    lines = (f"{number} {name}\n" for number, name in enumerate(_HAR_LABELS, start=1))
    (folder / "activity_labels.txt").write_text("".join(lines))
    for part, subjects in (("train", range(1, 11)), ("test", range(11, 13))):
        labels = np.tile(np.arange(1, 7), len(subjects))
        signals = folder / part / "Inertial Signals"
        signals.mkdir(parents=True)
        np.savetxt(folder / part / f"y_{part}.txt", labels, fmt="%d")
        np.savetxt(folder / part / f"subject_{part}.txt", np.repeat(subjects, 6), fmt="%d")
        for sensor in ("body_acc", "body_gyro", "total_acc"):
            for axis in "xyz":
                windows = labels[:, None] + draws.normal(size=(len(labels), 128))
                np.savetxt(signals / f"{sensor}_{axis}_{part}.txt", windows, fmt="%16.7e")
    return folder


def mnist(folder: Path) -> Path:
    """The four IDX files of (Fashion-)MNIST: 60 images to train on, 20 to test."""
    draws = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, count in (("train", 60), ("t10k", 20)):
        images = draws.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        header = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, count) + labels.tobytes())
    return folder


def text(folder: Path) -> Path:
    """A text of two thousand characters, and arrays of as many tokens."""
    draws = np.random.default_rng(0)
    folder.mkdir(parents=True)
    (folder / "input.txt").write_text("".join(map(chr, draws.integers(97, 123, 2000))))
    for split in ("train", "val"):
        draws.integers(0, 100, 1000, dtype=np.uint16).tofile(folder / f"{split}.bin")
    return folder


def chat(folder: Path) -> Path:
    """Conversations of one question and answer."""
    folder.mkdir(parents=True)
    talks = ([{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(40))
    (folder / "train.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return folder


def cifar10(folder: Path) -> Path:
    """The six files of CIFAR-10's binary version: 4 images each, for networks that are slow on a CPU."""
    draws = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = draws.integers(0, 256, (4, 1 + 3 * 32 * 32), dtype=np.uint8)
        records[:, 0] = np.arange(4)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder
