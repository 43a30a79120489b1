from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.trading import market as indicators
from multigpu_cli.trading.market import build
from multigpu_cli.trading.prices import draw_prices

PRICES = draw_prices(1, symbols=3, days=300)
SMALL: dict[str, Any] = {"period": 10, "turbulence_window": 30}


def shuffle_after(prices, day, seed=0):
    """The same prices up to and with a day, the later ones in another order."""
    order = np.concatenate(
        [np.arange(day + 1), np.random.default_rng(seed).permutation(np.arange(day + 1, len(prices)))]
    )
    return replace(prices, **{name: getattr(prices, name)[order] for name in ("open", "high", "low", "close")})


def test_features_of_a_day_tell_of_each_symbol_and_of_unrest():
    market = build(PRICES, **SMALL)
    assert market.features.shape == (300, 3 * 5 + 1)
    day, close = 150, PRICES.close
    second = market.features[day, 5:10]
    np.testing.assert_allclose(second[0], np.log(close[day, 1] / close[day - 1, 1]) / 0.02)
    np.testing.assert_allclose(second[1], indicators.macd(close)[day, 1] / close[day, 1] / 0.02)
    np.testing.assert_allclose(second[2], (indicators.rsi(close, 10)[day, 1] - 50) / 50)
    np.testing.assert_allclose(second[3], indicators.cci(PRICES.high, PRICES.low, close, 10)[day, 1] / 100)
    np.testing.assert_allclose(second[4], indicators.adx(PRICES.high, PRICES.low, close, 10)[day, 1] / 50)
    np.testing.assert_allclose(market.features[day, 15] ** 2 * 3, indicators.turbulence_indicators(close, 30)[day])
    assert np.isfinite(market.features).all()


def test_features_do_not_depend_on_the_level_of_prices():
    tenfold = replace(
        PRICES, **{name: getattr(PRICES, name) * [10, 1, 0.1] for name in ("open", "high", "low", "close")}
    )
    np.testing.assert_allclose(build(tenfold, **SMALL).features, build(PRICES, **SMALL).features, atol=1e-6)


@pytest.mark.parametrize("day", [60, 160, 250])  # in each of the splits
def test_no_feature_knows_the_future(day):
    before, after = build(PRICES, **SMALL), build(shuffle_after(PRICES, day), **SMALL)
    assert np.array_equal(before.features[: day + 1], after.features[: day + 1])
    assert not np.array_equal(before.features[day + 1 :], after.features[day + 1 :])


def test_the_threshold_is_a_quantile_of_the_training_dates_alone():
    before = build(PRICES, turbulence=0.8, **SMALL)
    _, last = before.days["train"]
    after = build(shuffle_after(PRICES, last), turbulence=0.8, **SMALL)
    assert np.array_equal(before.stopped[: last + 1], after.stopped[: last + 1])
    unrest = indicators.turbulence_indicators(PRICES.close, 30)
    threshold = np.quantile(unrest[31 : last + 1], 0.8)
    assert np.array_equal(before.stopped, unrest > threshold)
    assert not build(PRICES, turbulence=None, **SMALL).stopped.any()


def test_splits_follow_one_another_by_share_or_by_date():
    market = build(PRICES, window=26, **SMALL)
    assert market.days == {"train": (25, 216), "val": (217, 258), "test": (259, 299)}  # of 275 dates: 70, 15, 15 %
    by_date = build(PRICES, val_from=str(PRICES.dates[100]), test_from=PRICES.dates[200], **SMALL)
    assert by_date.days == {"train": (20, 99), "val": (100, 199), "test": (200, 299)}
    said = by_date.describe()
    assert f"test {PRICES.dates[200]} to {PRICES.dates[299]}" in said
    assert "synthetic" in said


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"val_from": "2020-13-01"}, "data.args.val_from: '2020-13-01' is not a date"),
        ({"test_from": "1999-01-01"}, "val has less than two dates"),
        ({"val_from": "2031-01-01"}, "val has less than two dates"),
        ({"period": 150}, "train has less than two dates"),
        ({"turbulence_window": 250}, "data.args.turbulence_window: no training date has 250 days"),
    ],
)
def test_dates_that_leave_a_split_without_any(wrong, says):
    with pytest.raises(RequestError, match=says):
        build(PRICES, **(SMALL | wrong))


def test_orders_are_carried_out_at_the_close_or_at_the_next_open():
    assert np.array_equal(build(PRICES, **SMALL).fill, PRICES.close)
    assert np.array_equal(build(PRICES, fill="open", **SMALL).fill[:-1], PRICES.open[1:])
