"""Plain YAML with line numbers; everything else is named and refused."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.config.yaml_text import UnreadableError, compose, dump, parse_plain, parse_typed

WORDS = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1)  # PyYAML itself loses U+0085
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


def read(text: str) -> Any:
    node = compose(text)
    assert node is not None
    return parse_typed(node)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: [1\nb: 2\n", 2, "malformed"),
        ("a: 1\n\tb: 2\n", 2, "malformed"),
        ("a: 1\n---\nb: 2\n", 2, "document"),
        ("a: 1\nb: 2\na: 3\n", 3, "first given on line 1"),
        ("x:\n  args:\n    a: 1\n    a: 2\n", 4, "repeated"),
        ("a: &x 1\nb: *x\n", 2, "aliases"),
        ("a: 1\nb: !!python/object/apply:os.system [x]\n", 2, "!!python"),
        ("b: !mine 3\n", 1, "!mine"),
        ("a: !!binary aGk=\n", 1, "!!binary"),
        ("a: 1\nb: \x01\n", 2, "control character"),
        ("? [a]\n: 2\n", 1, "key"),
        ("[" * 1500, 1, "deep"),
        ("a: 1\nb: [" + "1," * 300_000 + "]", 2, "more than 20,000 values"),
        ("- 1\n" * 300_000, 20_001, "more than 20,000 values"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(UnreadableError, match=words) as refusal:
        compose(text)
    assert refusal.value.line == line


def test_numbers_that_python_will_not_read_are_refused() -> None:
    with pytest.raises(UnreadableError, match="unreadable") as refusal:
        read("a: 1\nb: " + "9" * 5000)
    assert len(refusal.value.problem) < 120


def test_nothing_composes_to_nothing() -> None:
    assert compose("") is compose("# only a comment\n") is None


def test_scalars_of_settings_stay_as_they_are_written() -> None:
    root = compose("a: off\nb: 4e-3\nc: 010\nd: ~\ne: 'null'\nf: [0, on]\non: 1\ng: {no: no}\n")
    assert isinstance(root, yaml.MappingNode)
    found = {key.value: parse_plain(value) for key, value in root.value}
    words = {"a": "off", "b": "4e-3", "c": "010", "d": None, "e": "null", "f": ["0", "on"], "on": "1"}
    assert found == words | {"g": {"no": False}}


def test_free_values_have_types_and_exponents_need_no_dot() -> None:
    assert read("{a: 4e-3, b: 1.5, c: [1e5, true, no], d: 2026-01-31, e: '1', f: -3}") == {
        "a": 0.004,
        "b": 1.5,
        "c": [1e5, True, False],
        "d": "2026-01-31",
        "e": "1",
        "f": -3,
    }


@given(st.dictionaries(WORDS, VALUES, max_size=4))
def test_what_is_dumped_is_read_back(data: dict[str, Any]) -> None:
    if data:
        assert read(dump(data)) == data
