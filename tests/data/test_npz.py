import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from tests.support.run_training import run_training

X = np.arange(300.0).reshape(50, 6)
CLASSES = np.arange(50) % 3


def open_arrays(folder: Path | None, **args: Any) -> DataSource:
    return load_data_source(DataConfig(name="npz", dir=str(folder) if folder else None, args=args), 42)


def sizes(source: DataSource) -> list[int]:
    return [len(part) for part in (source.train, source.val, source.test) if part is not None]  # type: ignore[arg-type]


def test_arrays_with_splits_are_taken_as_they_are(tmp_path: Path) -> None:
    parts: dict[str, Any] = {}
    for split, size in (("train", 30), ("val", 10), ("test", 5)):
        parts |= {f"X_{split}": X[:size], f"y_{split}": CLASSES[:size]}
    np.savez(tmp_path / "data.npz", **parts)
    source = open_arrays(tmp_path)
    assert (sizes(source), source.num_classes, source.input_shape, source.task) == (
        [30, 10, 5],
        3,
        (6,),
        "classification",
    )
    inputs, target = source.train[7]
    assert (inputs.dtype, inputs.tolist(), int(target)) == (torch.float32, X[7].tolist(), 1)


def test_one_pair_of_arrays_is_divided_by_seed(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", X=X, y=CLASSES)
    source = open_arrays(tmp_path)
    assert sizes(source) == [40, 5, 5]
    rows = [int(row[0][0]) // 6 for part in (source.train, source.val, source.test) for row in part]  # type: ignore[union-attr]
    assert sorted(rows) == list(range(50))
    np.savez(tmp_path / "data.npz", X_train=X, y_train=CLASSES)
    assert sizes(open_arrays(tmp_path)) == [45, 5]


@pytest.mark.parametrize(
    ("inputs", "targets", "task", "classes", "outputs"),
    [
        (X, CLASSES, "classification", 3, 1),
        (X.astype(np.uint8), CLASSES == 1, "classification", 2, 1),
        (X, X.sum(1), "regression", 0, 1),
        (X, X[:, :2], "regression", 0, 2),
        (X, (X[:, :4] % 2).astype(int), "multi-label", 4, 4),
        (X.astype(int), X.astype(int) + 1, "language-model", 301, 6),
    ],
)
def test_the_targets_say_what_is_learned(
    tmp_path: Path, inputs: np.ndarray, targets: np.ndarray, task: str, classes: int, outputs: int
) -> None:
    np.savez(tmp_path / "data.npz", X=inputs, y=targets)
    source = open_arrays(tmp_path)
    assert (source.task, source.num_classes, source.num_outputs) == (task, classes, outputs)
    flags: dict[str, Any] = {"data": "npz", "data_dir": str(tmp_path), "model": source.model, "epochs": 1}
    ended = run_training(1, **flags, num_workers=0, save_dir=str(tmp_path / "run"), sets=["model.args.width=8"])
    assert ended.summary["status"] == "completed"


PRICES = (X[:, 0] * 7 + 100).astype(np.int64)  # 50 different whole numbers from 100 to 2,158


@pytest.mark.parametrize(
    "targets",
    [PRICES, PRICES + 1_700_000_000, np.arange(50), np.arange(50) % 2 + 1_700_000_000, PRICES.astype(np.uint16) - 500],
    ids=["prices", "seconds", "each once", "few large", "unsigned"],
)
def test_whole_numbers_that_number_no_classes_are_refused(tmp_path: Path, targets: np.ndarray) -> None:
    np.savez(tmp_path / "data.npz", X=X, y=targets)
    with pytest.raises(RequestError, match=r"data\.npz: y has \d+ different whole numbers from [\d,]+ to") as refused:
        open_arrays(tmp_path)
    assert "data.kind=regression" in refused.value.remedy
    assert "data.kind=classification" in refused.value.remedy


@pytest.mark.parametrize("targets", [np.arange(500) % 100, np.arange(500) % 20 + 1, np.arange(500) % 2 * 30])
def test_class_numbers_stay_classes(tmp_path: Path, targets: np.ndarray) -> None:
    np.savez(tmp_path / "data.npz", X=np.zeros((500, 2)), y=targets)
    source = open_arrays(tmp_path)
    assert (source.task, source.num_classes) == ("classification", targets.max() + 1)


def test_kind_decides_what_whole_numbers_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", X=X, y=PRICES)
    source = open_arrays(tmp_path, kind="classification")
    assert (source.task, source.num_classes) == ("classification", 2159)
    for targets in (PRICES, np.stack([PRICES, PRICES], axis=1)):
        np.savez(tmp_path / "data.npz", X=X, y=targets)
        source = open_arrays(tmp_path, kind="regression")
        assert (source.task, source.num_classes, source.num_outputs) == ("regression", 0, targets[0].size)
        target = source.train[0][1]
        assert target.dtype == torch.float32
        assert target.reshape(-1)[0] in torch.from_numpy(PRICES)


def test_kind_that_the_targets_do_not_fit_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", X=X, y=PRICES % 9 + 1_700_000_000)
    with pytest.raises(RequestError, match=r"y in .*: numbers such as .* are rounded by .* in float32"):
        open_arrays(tmp_path, kind="regression")
    np.savez(tmp_path / "data.npz", X=X, y=X[:, 0])
    with pytest.raises(RequestError, match=r"data\.kind: y in .* is no array of whole numbers") as refused:
        open_arrays(tmp_path, kind="classification")
    assert refused.value.remedy == "data.kind=regression"


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"X": X}, "holds no y"),
        ({"X_train": X, "y_train": CLASSES, "X_val": X}, "holds no y_val"),
        ({"X": X, "y": CLASSES[:-1]}, "X has 50 samples .* y 49"),
        ({"X": X, "y": np.array(["a"] * 50)}, "y in .* is <U1"),
        ({"X": X, "y": np.array([None] * 50)}, "Object arrays cannot be loaded"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Any], named: str) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(RequestError, match=named):
        open_arrays(tmp_path)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="needs --data-dir"):
        open_arrays(None)
    with pytest.raises(RequestError, match=r"must hold one \.npz file, and it holds none at all"):
        open_arrays(tmp_path)
    (tmp_path / "data.npz").write_bytes(b"PK no zip")
    with pytest.raises(RequestError, match=r"data\.npz"):
        open_arrays(tmp_path)
    with pytest.raises(RequestError, match="there is no such file") as refused:
        open_arrays(tmp_path, file="date.npz")
    assert "did you mean 'data.npz'?" in refused.value.remedy


def write_npy(shape: str, dtype: str = "<f4") -> bytes:
    """The bytes of an array's file that has a header and 16 bytes of content."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + bytes(16)


@pytest.mark.parametrize(
    ("member", "start", "damage"),
    [
        (write_npy("(4,)"), 30, bytes(range(200, 216))),  # zlib.error: what is compressed
        (write_npy("(4,)"), 8, b"\x63\x00"),  # NotImplementedError: compression method 99
        (write_npy("(4,)"), 6, b"\x01\x00"),  # RuntimeError: encrypted
        (write_npy("(1000000000000000,)"), 0, b""),  # MemoryError
        (write_npy("(99999999999999999999999,)"), 0, b""),  # OverflowError
        (write_npy("(-4,)"), 0, b""),
        (write_npy("(4,)", "O"), 0, b""),  # a pickle
        (write_npy("((((4,)"), 0, b""),
        (write_npy("(" * 3000), 0, b""),
        (b"\x93NUMPY\x09\x00", 0, b""),
        (b"", 0, b""),
    ],
)
def test_npz_that_is_damaged_is_refused_by_name(tmp_path: Path, member: bytes, start: int, damage: bytes) -> None:
    """Whatever zipfile, its decompressors or NumPy raise."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", member)
        archive.writestr("y.npy", write_npy("(4,)"))
    content = bytearray(file.getvalue())
    for header in (0, content.index(b"PK\x01\x02") + 2) if start < 30 else (5,):  # the member's own, and the list's
        content[header + start : header + start + len(damage)] = damage
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(RequestError, match=r"data\.npz(:| is) ."):
        open_arrays(tmp_path)


def test_npz_that_is_a_fifo_is_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.npz")
    with pytest.raises(RequestError, match="is a FIFO"):
        open_arrays(tmp_path)
