"""Writes two tables of made-up measurements, as JSON lines and as Arrow files: large/day and large/night."""

import json
import random
from pathlib import Path

from multigpu_cli.data.rows.convert import convert_to_arrow


def write_rows(file: Path, count: int, shift: float) -> None:
    with file.open("w") as lines:
        for _ in range(count):
            heat, wind = random.gauss(shift, 1), random.gauss(0, 1)
            label = int(heat + wind > shift)
            lines.write(json.dumps({"heat": heat, "wind": wind, "label": label}) + "\n")


if __name__ == "__main__":
    random.seed(0)
    folder = Path("large")
    folder.mkdir(exist_ok=True)
    for name, count, shift in (("day", 3000, 0.5), ("night", 1000, -0.5)):
        write_rows(folder / f"{name}.jsonl", count, shift)
        if not (folder / name).exists():  # the same rows, written before
            print(convert_to_arrow(folder / f"{name}.jsonl", folder / name))
