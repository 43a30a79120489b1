import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.errors import RequestError

RECORDS: list[dict[str, Any]] = [
    {"size": n / 4, "kind": "ab"[n % 2], "new": n % 3 == 0, "label": ("cat", "dog")[n % 2]} for n in range(40)
]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n\n" for record in records))
    return path


def load(path: Path, **args: Any) -> Any:
    return load_data_source(DataConfig(name="csv", dir=str(path), args={"target": "label", **args}), 42)


def test_plain_records_are_the_same_table_as_a_csv_file(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    rows = [",".join(map(str, record.values())) for record in RECORDS]
    table.write_text("\n".join([",".join(RECORDS[0]), *rows]))
    ours, theirs = load(write(tmp_path / "table.jsonl", RECORDS)), load(table)
    for split in ("train", "val", "test"):
        for one, other in zip(getattr(ours, split).tensors, getattr(theirs, split).tensors, strict=True):
            assert torch.equal(one, other)
    assert ours.class_names == ("cat", "dog")


def test_what_a_record_lacks_is_missing(tmp_path: Path) -> None:
    records = [dict(record) for record in RECORDS]
    del records[1]["kind"]
    records[2]["size"] = None
    records[3]["label"] = None
    source = load(write(tmp_path / "table.jsonl", records))
    assert sum(len(getattr(source, split)) for split in ("train", "val", "test")) == 39
    assert "missing" in str(source.codec.learned["categories"])


@pytest.mark.parametrize(
    ("record", "said"),
    [({"size": [1, 2], "label": "cat"}, r"table\.jsonl:81: size is a list"), ({}, "")],
)
def test_a_value_that_is_no_cell_is_named(record: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "table.jsonl", [*RECORDS, record] if record else [])
    with pytest.raises(RequestError, match=said or "no rows"):
        load(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_count_as_missing_with_their_place(tmp_path: Path, value: float) -> None:
    records = [dict(record) for record in RECORDS]
    records[17]["size"] = value
    source = load(write(tmp_path / "table.jsonl", records))
    assert f"table.jsonl:35: {value} in column 'size' counts as missing" in source.warnings[0]
    gap = load(
        write(
            tmp_path / "gap.jsonl",
            [{**record, "size": None} if at == 17 else record for at, record in enumerate(RECORDS)],
        )
    )
    assert torch.equal(source.train.tensors[0], gap.train.tensors[0])
    as_target = load(tmp_path / "table.jsonl", target="size")
    assert "without 1 of 40 rows of table.jsonl, which have no target" in as_target.note
