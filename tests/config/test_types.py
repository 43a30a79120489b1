"""One parser for flags, YAML and --set: what each kind takes, and what it says where it does not."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.config import types
from multigpu_cli.config.types import ValueType, choice, integer, number

COUNT = integer(1, 100, word="auto")
RATE = number(0, above=True)
DECAY = number(0, 1, above=True, below=True, word="off")


def wrong(kind: ValueType, *values: Any) -> list[tuple[ValueType, Any]]:
    return [(kind, value) for value in values]


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        (COUNT, "7", 7),
        (COUNT, 7.0, 7),
        (COUNT, "auto", "auto"),
        (RATE, "4e-3", 0.004),
        (RATE, 1, 1.0),
        (DECAY, "0.999", 0.999),
        (DECAY, False, "off"),
        (DECAY, "off", "off"),
        (choice("off", "on"), True, "on"),
        (choice("off", "on"), "off", "off"),
        (types.switch, "yes", True),
        (types.switch, False, False),
        (types.text, 3, "3"),
        (types.gpu_ids, "0, 2", (0, 2)),
        (types.gpu_ids, ["1", 0], (1, 0)),
        (types.gpu_ids, 3, (3,)),
        (types.every, "10m", "10m"),
        (types.every, 500, "500"),
        (types.patterns, ["a.*", "b"], ("a.*", "b")),
        (types.patterns, "a.*", ("a.*",)),
        (types.args, {"rate": "1e-3", "depth": 2}, {"rate": 0.001, "depth": 2}),
    ],
)
def test_what_is_meant_is_read(kind: ValueType, written: Any, read: Any) -> None:
    assert kind.parse(written) == read


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        *wrong(COUNT, "0", "-3", "101", "2.5", "nan", "ten", "", True, None, [1], {}, "9" * 5000),
        *wrong(RATE, "0", "-1", "nan", "inf", "-inf", "1e999", "", "fast", True, None, [1], 10**400),
        *wrong(DECAY, "0", "1", "1.5", "on", True),
        *wrong(choice("off", "on"), "On", "", None, ["on"], 3),
        *wrong(types.switch, "maybe", 2, None, ""),
        *wrong(types.text, "", "  ", "a\0b", True, ["a"], {}),
        *wrong(types.gpu_ids, "", "0,", "-1", "0,0", "gpu0", [], "0;1", "0.5", True),
        *wrong(types.every, "0", "0m", "10s", "-5", "1.5m", True, ""),
        *wrong(types.args, "x", [1], {1: 2}),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_short_line(kind: ValueType, written: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|names a GPU twice") as refusal:
        kind.parse(written)
    assert len(str(refusal.value)) < 200
    assert "\n" not in str(refusal.value)


@given(st.integers(), st.integers(), st.integers())
def test_an_integer_is_itself_or_refused(low: int, high: int, value: int) -> None:
    kind = integer(low, high)
    if low <= value <= high and abs(value) < 10**30:
        assert kind.parse(str(value)) == kind.parse(value) == value
    else:
        with pytest.raises(ValueError, match="must be"):
            kind.parse(str(value))


@given(st.floats())
def test_a_number_is_itself_or_refused(value: float) -> None:
    if math.isfinite(value) and value > 0:
        assert RATE.parse(repr(value)) == RATE.parse(value) == value
    else:
        with pytest.raises(ValueError, match="must be a number above 0"):
            RATE.parse(repr(value))


def test_a_near_word_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        choice("cosine", "linear").parse("cosin")
    with pytest.raises(ValueError, match=r"^must be cosine or linear, not 'x'$"):
        choice("cosine", "linear").parse("x")
