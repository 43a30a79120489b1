from typing import Any

import numpy as np
import pytest
import torch

from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.factories import call_factory
from multigpu_cli.trading.request import group
from tests.support.world import CPU
from tests.trading.csv_files import lines, write

SMALL: dict[str, Any] = {"made_days": 200, "period": 5, "turbulence_window": 20}


def make_group(split="train", data_dir=None, numbers=range(2), seed=1, **args):
    return group(split, data_dir, numbers, seed, CPU, **({} if data_dir else SMALL) | args)


def test_without_a_folder_prices_are_made_up_alike_for_all_splits_and_seeds():
    train, test = make_group(), make_group("test", seed=5)
    assert np.array_equal(train.market.close, test.market.close)
    assert "synthetic" in train.market.describe()
    assert train.observation_shape == (5 * 5 + 1 + 1 + 5,)
    assert train.action.shape == (5,)
    assert make_group(symbols=3, window=7).observation_shape == (7, 3 * 5 + 1 + 1 + 3)
    assert not np.array_equal(make_group(made_seed=1).market.close, train.market.close)


@pytest.mark.parametrize("split", ["val", "test"])
def test_held_out_splits_are_played_once_from_their_first_date_to_their_last(split):
    played = make_group(split, length=3, start="random")
    first, last = played.market.days[split]
    played.reset()
    assert played.state()["first"].tolist() == [first, first]
    ended = [bool(played.step(torch.zeros(2, 5)).truncated.all()) for _ in range(last - first)]
    assert ended.index(True) == last - first - 1
    assert played.figures()["buy_and_hold_cumulative_return"].shape == (2,)


def test_the_files_of_a_folder_are_traded(tmp_path):
    folder = write(tmp_path, A=lines(60), B=lines(60, price=50))
    args: dict[str, Any] = {"period": 3, "turbulence": None, "val_from": "2020-02-10", "test_from": "2020-02-20"}
    found = make_group("val", folder, **args)
    assert found.market.symbols == ("A", "B")
    assert str(found.market.dates[found.market.days["val"][0]]) == "2020-02-10"
    assert make_group("val", folder, symbols=["B"], **args).market.symbols == ("B",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 0},
        {"length": 0},
        {"length": 2.5},
        {"start": "middle"},
        {"cash": 0},
        {"cash": float("nan")},
        {"max_shares": 0},
        {"made_days": 1},
        {"made_days": 2.5},
        {"cost": 1},
        {"cost": -0.1},
        {"turbulence": 90},
        {"turbulence_window": 1},
        {"period": 1},
        {"fill": "high"},
        {"reward_scale": 0},
        {"reward_scale": True},
        {"symbols": "AAPL"},
        {"symbols": 0},
        {"symbols": True},
    ],
)
def test_arguments_that_make_no_environment_are_refused_by_name(wrong):
    offered = {"split": "train", "data_dir": None, "numbers": range(2), "seed": 1, "device": CPU}
    with pytest.raises(RequestError, match=f"data.args.{next(iter(wrong))}.*(must be|\n  try: )"):
        call_factory(group, offered, SMALL | wrong, where="data")


def test_a_number_of_symbols_names_no_files(tmp_path):
    with pytest.raises(RequestError, match=r"data.args.symbols: 3 is not the name"):
        make_group(data_dir=write(tmp_path, A=lines(60)), symbols=3)


def test_real_prices(real_data):
    found = make_group("test", str(real_data("prices") / "stocknet"), window=30)
    assert found.observation_shape == (30, 5 * 5 + 1 + 1 + 5)
    first, last = found.market.days["test"]
    assert (str(found.market.dates[first]), str(found.market.dates[last])) == ("2016-12-15", "2017-09-01")
    assert 0.05 < found.market.stopped[slice(*found.market.days["train"])].mean() < 0.12  # unknown in the first year
    found.reset()
    for _ in range(last - first):
        stepped = found.step(torch.ones(2, 5))
    assert stepped.truncated.all()
    assert 0 < float(found.figures()["buy_and_hold_cumulative_return"][0]) < 1
