"""How cost grows with the work, counted in calls and in bytes: times say little on a busy machine."""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source


def count_calls(work: Callable[[], Any]) -> int:
    """How many functions of this program are called, each item of a generator counted too."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and "/multigpu_cli/" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def write_table(folder: Path, count: int) -> DataConfig:
    draws = random.Random(0)
    rows = [[draws.gauss(0, 1), "" if at % 9 == 5 else draws.random(), draws.choice("ab")] for at in range(count)]
    lines = [f"{number:.7f},{gap},{word},{at % 3}" for at, (number, gap, word) in enumerate(rows)]
    folder.mkdir()
    (folder / "t.csv").write_text("\n".join(["number,gap,word,target", *lines]))
    return DataConfig(name="csv", dir=str(folder), args={"target": "target"})


def test_the_cells_of_a_table_are_read_column_by_column(tmp_path: Path) -> None:
    small, large = (write_table(tmp_path / str(count), count) for count in (1000, 3000))
    load_data_source(small, 0)
    more = count_calls(lambda: load_data_source(large, 0)) - count_calls(lambda: load_data_source(small, 0))
    assert more / 2000 < 5, "calls a row"
