"""Which tests are asked about a fault."""

from pathlib import Path

from tests.mutants.mutations import files
from tests.mutants.nearest import _NEAR

ROOT = Path(__file__).resolve().parents[2]


def test_the_tests_that_are_named_after_a_file_are_near_also_where_processes_are() -> None:
    far = []
    for file in map(Path, files(ROOT)):
        room = file.parts[1]
        near = _NEAR[room]
        for folder in (room, "distributed"):
            test = f"tests/{folder}/test_{file.stem}.py"
            if (ROOT / test).exists() and not test.startswith(near):
                far.append(test)
    assert not far


def test_each_place_is_there() -> None:
    assert not [place for places in _NEAR.values() for place in places if not (ROOT / place).exists()]
