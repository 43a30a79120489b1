from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.language.chat import samples
from multigpu_cli.language.chat.samples import Packs, pack_first_fit, pack_windows, pad_samples
from multigpu_cli.runtime.model_call import IGNORED

CAPACITY, PAD = 20, 3
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60)


def list_packs(packs: Packs) -> list[list[int]]:
    samples, begins = packs
    assert (begins[0], begins[-1]) == (0, len(samples))
    return [part.tolist() for part in np.split(samples, begins[1:-1])]


def pack_by_definition(order: list[int], lengths: list[int]) -> list[list[int]]:
    """First-fit decreasing, which looks at each pack in turn."""
    packs: list[list[int]] = []
    for sample in sorted(order, key=lambda sample: -lengths[sample]):
        fits = (pack for pack in packs if sum(lengths[each] for each in pack) + lengths[sample] <= CAPACITY)
        if (pack := next(fits, None)) is None:
            packs.append(pack := [])
        pack.append(sample)
    return packs


@given(LENGTHS)
def test_it_is_first_fit_decreasing(lengths: list[int]) -> None:
    packs = list_packs(pack_first_fit(np.array(lengths), CAPACITY))
    assert packs == pack_by_definition(list(range(len(lengths))), lengths)


@given(LENGTHS)
def test_each_sample_is_in_one_pack_and_none_overflows(lengths: list[int]) -> None:
    packs = list_packs(pack_first_fit(np.array(lengths), CAPACITY))
    assert sorted(sample for pack in packs for sample in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[sample] for sample in pack) <= CAPACITY for pack in packs)


@given(LENGTHS, st.integers(1, 20), st.integers(1, 3), st.randoms())
def test_each_window_of_an_order_is_packed_by_itself(
    lengths: list[int], window: int, at_once: int, dice: object
) -> None:
    order = list(range(len(lengths)))
    dice.shuffle(order)  # type: ignore[attr-defined]
    with patch.object(samples, "_AT_ONCE", at_once):
        packs = list_packs(pack_windows(np.array(order), np.array(lengths), CAPACITY, window))
    windows = [order[first : first + window] for first in range(0, len(order), window)]
    assert packs == [pack for each in windows for pack in pack_by_definition(each, lengths)]


@given(LENGTHS, st.integers(1, 30), st.integers(CAPACITY, 40))
def test_padding_is_a_text_of_its_own_up_to_a_multiple(lengths: list[int], multiple: int, limit: int) -> None:
    samples = [{name: torch.full((k,), k) for name in ("input_ids", "position_ids", "labels")} for k in lengths]
    batch = pad_samples(samples, padding=PAD, multiple=multiple, limit=limit)
    width = batch["input_ids"].shape[1]
    assert width >= max(lengths)
    assert width % multiple == 0 or width == limit
    assert width - max(lengths) < multiple
    for row, length in enumerate(lengths):
        for name, values in batch.items():
            assert values[row, :length].tolist() == [length] * length
            rest = values[row, length:].tolist()
            fill = {"input_ids": [PAD] * len(rest), "labels": [IGNORED] * len(rest)}
            assert rest == fill.get(name, list(range(len(rest))))


@given(LENGTHS)
def test_rows_are_as_long_as_the_longest_by_default(lengths: list[int]) -> None:
    samples = [
        {name: torch.zeros(k, dtype=torch.int64) for name in ("input_ids", "position_ids", "labels")} for k in lengths
    ]
    assert {values.shape for values in pad_samples(samples, padding=PAD).values()} == {(len(lengths), max(lengths))}
