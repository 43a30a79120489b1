"""Small datasets of rows in every format that stays on the disk: the same rows in each."""

import json
import tarfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

ROWS: list[dict[str, Any]] = [
    {"a": n / 4, "b": float(n % 7), "label": n % 2, "kind": ("cat", "dog")[n % 2]} for n in range(60)
]


def write_arrow(folder: Path, rows: Sequence[dict[str, Any]] = ROWS, *, batch: int = 7, **types: Any) -> Path:
    """One .arrow file, of record batches of some rows; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(list(rows))
    for name, kind in types.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, table.column(at).cast(kind))
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table, max_chunksize=batch)
    return folder


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    """One file; every third line is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" * (1 + (at % 3 == 0)) for at, row in enumerate(rows)))
    return path


def write_tar(folder: Path, samples: Sequence[dict[str, bytes]], shards: int = 2) -> Path:
    """Shards with the samples, each a mapping of ending to content, under the keys 0000, 0001, …"""
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(samples) // shards)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as archive:
            for key in range(shard * size, min(len(samples), (shard + 1) * size)):
                for ending, content in samples[key].items():
                    info = tarfile.TarInfo(f"{key:04d}.{ending}")
                    info.size = len(content)
                    archive.addfile(info, BytesIO(content))
    return folder


def make_samples(rows: Sequence[dict[str, Any]] = ROWS) -> list[dict[str, bytes]]:
    """The rows as members of a .tar: an array of the numbers, the label, and all of it as JSON."""
    return [
        {
            "npy": encode_array(np.array([row["a"], row["b"]], dtype=np.float32)),
            "cls": str(row["label"]).encode(),
            "json": json.dumps(row).encode(),
        }
        for row in rows
    ]


def encode_array(array: np.ndarray) -> bytes:
    """The content of a .npy file."""
    sink = BytesIO()
    np.save(sink, array)
    return sink.getvalue()


def encode_image(value: int, size: int = 12) -> bytes:
    """A grey PNG."""
    from PIL import Image  # an extra of the program

    sink = BytesIO()
    Image.fromarray(np.full((size, size + 3, 3), value, dtype=np.uint8)).save(sink, "PNG")
    return sink.getvalue()
