from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.language.chat.samples import count_first_fit, pack_first_fit, pack_windows

CAPACITY = 20
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60)


@given(LENGTHS)
def test_each_sample_is_in_one_pack_and_none_overflows(lengths: list[int]) -> None:
    packs = pack_first_fit(range(len(lengths)), lengths, CAPACITY)
    assert sorted(sample for pack in packs for sample in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[sample] for sample in pack) <= CAPACITY for pack in packs)


@given(LENGTHS)
def test_it_is_first_fit_decreasing(lengths: list[int]) -> None:
    """The same as the plain definition, which looks at each pack in turn."""
    packs: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        fits = (pack for pack in packs if sum(lengths[each] for each in pack) + lengths[sample] <= CAPACITY)
        if (pack := next(fits, None)) is None:
            packs.append(pack := [])
        pack.append(sample)
    assert pack_first_fit(range(len(lengths)), lengths, CAPACITY) == packs


@given(LENGTHS, st.integers(1, 20), st.randoms())
def test_windows_follow_the_order(lengths: list[int], window: int, dice: object) -> None:
    order = list(range(len(lengths)))
    dice.shuffle(order)  # type: ignore[attr-defined]
    packs = list(pack_windows(order, lengths, CAPACITY, window))
    places = {sample: place // window for place, sample in enumerate(order)}
    windows = [{places[sample] for sample in pack} for pack in packs]
    assert all(len(each) == 1 for each in windows)
    assert [min(each) for each in windows] == sorted(min(each) for each in windows)


@given(LENGTHS, st.randoms())
def test_in_one_window_the_number_of_packs_does_not_depend_on_the_order(lengths: list[int], dice: object) -> None:
    order = list(range(len(lengths)))
    dice.shuffle(order)  # type: ignore[attr-defined]
    count = len(pack_first_fit(order, lengths, CAPACITY))
    assert count == len(pack_first_fit(range(len(lengths)), lengths, CAPACITY))
    assert count == count_first_fit(sorted(lengths, reverse=True), CAPACITY)
