import numpy as np
import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.language.text import Bytes, Numbers, build_characters, deserialize_vocabulary

TEXT = "To be, or not to be:\n‘that’ is the 問題 😀"


def test_characters_there_and_back() -> None:
    known, tokens = build_characters(TEXT)
    assert known.size == len(set(TEXT))
    assert tokens.dtype == np.uint16
    assert known.decode(tokens.tolist()) == TEXT
    assert known.encode(TEXT) == tokens.tolist()
    assert known.encode("\n") == [0], "in order of code points"


def test_a_character_that_was_not_there_is_named() -> None:
    known, _ = build_characters(TEXT)
    with pytest.raises(RequestError, match="the characters 'Z', 'é'") as refused:
        known.encode("éZ")
    assert "😀" in refused.value.remedy


def test_bytes_there_and_back() -> None:
    assert Bytes().decode(Bytes().encode(TEXT)) == TEXT
    assert Bytes().decode([0xC3]) == "\ufffd"
    assert max(Bytes().encode(TEXT)) < Bytes.size


def test_numbers_there_and_back() -> None:
    assert Numbers(10).encode(" 3 9\n0") == [3, 9, 0]
    assert Numbers(10).decode([3, 9, 0]) == "3 9 0"
    for wrong in ("10", "-1", "be"):
        with pytest.raises(RequestError, match=f"'{wrong}' is not a token"):
            Numbers(10).encode(f"1 {wrong}")


def test_a_mark_holds_all_of_a_vocabulary() -> None:
    for known in (build_characters(TEXT + "1:2")[0], Bytes(), Numbers(70_000)):
        again = deserialize_vocabulary(known.serialize())
        assert (type(again), again.size, again.serialize()) == (type(known), known.size, known.serialize())
