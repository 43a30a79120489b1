from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.planning.batch import make_key

numbers = st.integers(0, 2**64 - 1)


@given(parts=st.lists(numbers, min_size=1, max_size=4))
def test_a_key_is_a_seed_that_every_generator_takes(parts: list[int]) -> None:
    assert 0 <= make_key(*parts) < 2**63
    assert make_key(*parts) == make_key(*parts)


def test_keys_of_neighbours_are_all_different() -> None:
    found = {make_key(seed, epoch, index) for seed in range(20) for epoch in range(20) for index in range(50)}
    assert len(found) == 20 * 20 * 50


def test_order_and_number_of_the_parts_matter() -> None:
    assert len({make_key(1, 2), make_key(2, 1), make_key(1), make_key(1, 0), make_key(0, 1), make_key(0, 1, 2)}) == 6


def test_a_resumed_run_finds_the_keys_of_earlier_versions() -> None:
    assert (make_key(42, 3, 17), make_key(2**64 - 1, 1)) == (5674814503582151999, 912937166735423958)


def test_near_numbers_give_unrelated_bits() -> None:
    flipped = [(make_key(42, n) ^ make_key(42, n + 1)).bit_count() for n in range(1000)]
    assert 28 < sum(flipped) / 1000 < 35
    assert min(flipped) > 10
