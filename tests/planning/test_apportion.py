from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.planning.batch import apportion


@given(total=st.integers(0, 10**6), weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=8))
def test_the_parts_sum_up_and_are_near_their_shares(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights)
    assert sum(counts) == total
    shares = [total * weight / sum(weights) for weight in weights]
    assert all(abs(count - share) <= 1 for count, share in zip(counts, shares, strict=True))


def test_a_tie_goes_to_the_first() -> None:
    assert apportion(5, [1, 1]) == [3, 2]
