"""The end of `make test-all`: adds up what every process measured, and prints the share of lines that ran, by room.

A file that no process loaded counts with all its lines. Nothing here fails a run of the tests.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import NamedTuple

from coverage import Coverage

ROOT = Path(__file__).resolve().parents[1]


class Lines(NamedTuple):
    """How many lines of a file can run, and how many have."""

    path: PurePath
    lines: int
    run: int


def room_of(path: PurePath) -> str:
    """The room of a file of the package, or the file itself where it is in none."""
    parts = path.parts
    return f"{parts[0]}/{parts[1]}/" if len(parts) > 2 else str(path)


def table(files: Iterable[Lines]) -> str:
    """A row for each room, the least covered one first, then one for all of them."""
    lines: Counter[str] = Counter()
    run: Counter[str] = Counter()
    for file in files:
        for name in (room_of(file.path), "all"):
            lines[name] += file.lines
            run[name] += file.run
    rooms = sorted(filter(lines.get, lines), key=lambda name: (name == "all", run[name] / lines[name], name))
    head = f"{'lines':>7} {'run':>7} {'share':>7}"
    return "\n".join([head, *(_row(name, lines[name], run[name]) for name in rooms)])


def _row(name: str, lines: int, run: int) -> str:
    return f"{lines:7} {run:7} {run / lines:7.1%}  {name}"


def lines_by_file(coverage: Coverage) -> Iterable[Lines]:
    """The files of this project; copies of it that tests made elsewhere count as these (see tool.coverage.paths)."""
    for name in sorted(coverage.get_data().measured_files()):
        path = Path(name)
        if path.suffix == ".py" and path.is_relative_to(ROOT) and path.is_file():  # Jinja's has its template's name
            _, statements, _, missing, _ = coverage.analysis2(name)
            yield Lines(path.relative_to(ROOT), len(statements), len(statements) - len(missing))


def main() -> None:
    """Combine the files of all processes and print the table."""
    coverage = Coverage(config_file=ROOT / "pyproject.toml")
    coverage.combine()
    coverage.save()
    print(table(lines_by_file(coverage)))


if __name__ == "__main__":
    main()
