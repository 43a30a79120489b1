from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.planning.rng_keys import key, mixed

numbers = st.integers(0, 2**64 - 1)


def test_splitmix64_gives_its_published_numbers() -> None:
    """The first outputs for seed 1234567, as in the reference implementation (Vigna, splitmix64.c)."""
    golden, state, found = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        found.append(mixed(state))
        state = (state + golden) % 2**64
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(parts=st.lists(numbers, min_size=1, max_size=4))
def test_a_key_is_a_seed_that_every_generator_takes(parts: list[int]) -> None:
    assert 0 <= key(*parts) < 2**63
    assert key(*parts) == key(*parts)


def test_keys_of_neighbours_are_all_different() -> None:
    found = {key(seed, epoch, index) for seed in range(20) for epoch in range(20) for index in range(50)}
    assert len(found) == 20 * 20 * 50


def test_order_and_number_of_the_parts_matter() -> None:
    assert len({key(1, 2), key(2, 1), key(1), key(1, 0), key(0, 1), key(0, 1, 2)}) == 6


def test_near_numbers_give_unrelated_bits() -> None:
    flipped = [(key(42, n) ^ key(42, n + 1)).bit_count() for n in range(1000)]
    assert 28 < sum(flipped) / 1000 < 35
    assert min(flipped) > 10
