import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multigpu_cli.data.order import RowSelection, divide_rows
from multigpu_cli.errors import RequestError


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(10, 400), parts=st.integers(0, 2), seed=st.integers(0, 2**40))
def test_each_row_is_in_one_part_and_neighbours_stay_in_order(rows: int, parts: int, seed: int) -> None:
    selections = divide_rows(rows, parts, seed, "data")
    found = [part.find_rows(range(len(part))) for part in selections]
    assert sorted(np.concatenate(found).tolist()) == list(range(rows))
    assert all((np.diff(each) > 0).all() for each in found)
    assert [len(each) for each in found[1:]] == [rows // 10] * parts


def test_rows_are_found_one_by_one_as_all_at_once_and_by_seed() -> None:
    train, val, _ = divide_rows(1000, 2, 7, "data")
    for part in (train, val):
        together = part.find_rows(np.arange(len(part)))
        assert [int(part.find_rows([at])[0]) for at in range(len(part))] == together.tolist()
    assert not np.array_equal(val.find_rows(range(100)), divide_rows(1000, 2, 8, "data")[1].find_rows(range(100)))
    places = np.bincount(divide_rows(50_000, 2, 7, "data")[2].find_rows(range(5000)) % 10, minlength=10)
    assert places.min() > 400, "every place of ten is drawn about as often"


def test_a_store_that_is_not_divided_is_whole() -> None:
    assert RowSelection(5).find_rows(range(5)).tolist() == [0, 1, 2, 3, 4]


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(RequestError, match="9 rows can't be divided into 3 parts"):
        divide_rows(9, 2, 0, "data")
