"""How cost grows: exponents of known costs, and the table in its place."""

from pathlib import Path

import pytest

from benchmarks import growth
from benchmarks.growth import AXES, describe, find_exponent, write_section
from benchmarks.paired_timing import ROOT, Spent

SIZES = (10, 100, 1000)


@pytest.mark.parametrize(
    ("sizes", "costs", "expected"),
    [
        (SIZES, (2.0, 2.1, 2.05), 0.0),
        (SIZES, (2.0, 3.0, 2.9), 0.01),
        (SIZES, (2.0, 4.0, 24.0), 1.0),
        ((1, 4, 12), (2.8, 5.8, 13.8), 1.0),
        ((1, 4, 12), (2.0, 5.0, 30.6), 2.0),
    ],
)
def test_an_exponent_is_that_of_what_comes_on_top(
    sizes: tuple[int, ...], costs: tuple[float, ...], expected: float
) -> None:
    assert find_exponent(sizes, costs, 0.3) == pytest.approx(expected, abs=0.011)


def test_what_grows_faster_than_it_should_is_named() -> None:
    axis = next(axis for axis in AXES if axis.name == "steps")
    even, steep = ([Spent(cost, 2**28) for cost in costs] for costs in ((2.0, 4.0, 22.0), (2.0, 3.0, 102.0)))
    assert describe(axis, SIZES, even)[-2:] == ("1.0, 0.0", "good: nothing stays of a step")
    assert "faster" in describe(axis, SIZES, steep)[-1]


def test_the_table_stands_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "measurements.md"
    page.write_text(growth._PAGE.read_text())
    monkeypatch.setattr(growth, "_PAGE", page)
    for name in ("first", "second"):
        write_section([[name] * 6])
    text = page.read_text()
    assert "| second |" in text
    assert "| first |" not in text
    assert (
        text.partition("## How cost grows")[0]
        == ROOT.joinpath("docs/measurements.md").read_text().partition("## How cost grows")[0]
    )
    assert text.endswith("<!-- end of growth -->\n")
