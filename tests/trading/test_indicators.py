from itertools import pairwise

import numpy as np
import pytest

from multigpu_cli.trading import market
from multigpu_cli.trading.prices import draw_prices

PRICES = draw_prices(1, symbols=3, days=120)
INDICATORS = {
    "macd": lambda prices: market.macd(prices.close),
    "rsi": lambda prices: market.rsi(prices.close, 14),
    "cci": lambda prices: market.cci(prices.high, prices.low, prices.close, 20),
    "adx": lambda prices: market.adx(prices.high, prices.low, prices.close, 14),
    "turbulence": lambda prices: market.turbulence_indicators(prices.close, 40),
}


def smooth(values, weight):
    found = [values[0]]
    for value in values[1:]:
        found.append((1 - weight) * found[-1] + weight * value)
    return found


def slow_macd(close):
    fast, slow = smooth(close, 2 / 13), smooth(close, 2 / 27)
    return [one - other for one, other in zip(fast, slow, strict=True)]


def slow_rsi(close, period):
    changes = [0.0] + [after - before for before, after in pairwise(close)]
    gains = smooth([max(change, 0) for change in changes], 1 / period)
    losses = smooth([max(-change, 0) for change in changes], 1 / period)
    both = zip(gains, losses, strict=True)
    return [50.0 if gain + loss == 0 else 100 - 100 / (1 + gain / loss) if loss else 100.0 for gain, loss in both]


def slow_cci(high, low, close, period):
    typical = [sum(three) / 3 for three in zip(high, low, close, strict=True)]
    found = []
    for day in range(len(close)):
        window = [typical[max(0, at)] for at in range(day - period + 1, day + 1)]
        mean = sum(window) / period
        deviation = sum(abs(value - mean) for value in window) / period
        found.append((typical[day] - mean) / (0.015 * deviation) if deviation > 1e-12 else 0.0)
    return found


def slow_adx(high, low, close, period):
    plus, minus, ranges = [0.0], [0.0], [max(high[0], close[0]) - min(low[0], close[0])]
    for day in range(1, len(close)):
        up, down = high[day] - high[day - 1], low[day - 1] - low[day]
        plus.append(up if up > down and up > 0 else 0.0)
        minus.append(down if down > up and down > 0 else 0.0)
        ranges.append(max(high[day] - low[day], abs(high[day] - close[day - 1]), abs(low[day] - close[day - 1])))
    plus, minus, ranges = (smooth(values, 1 / period) for values in (plus, minus, ranges))
    moves = [(100 * up / reach, 100 * down / reach) for up, down, reach in zip(plus, minus, ranges, strict=True)]
    strength = [100 * abs(up - down) / (up + down) if up + down else 0.0 for up, down in moves]
    return smooth(strength, 1 / period)


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("macd", lambda high, low, close: slow_macd(close)),
        ("rsi", lambda high, low, close: slow_rsi(close, 14)),
        ("cci", lambda high, low, close: slow_cci(high, low, close, 20)),
        ("adx", lambda high, low, close: slow_adx(high, low, close, 14)),
    ],
)
def test_an_indicator_equals_the_loop_of_its_textbook(name, slow):
    columns = zip(PRICES.high.T, PRICES.low.T, PRICES.close.T, strict=True)
    expected = np.array([slow(high.tolist(), low.tolist(), close.tolist()) for high, low, close in columns]).T
    np.testing.assert_allclose(INDICATORS[name](PRICES), expected, atol=1e-9)


def test_turbulence_is_the_distance_of_a_day_from_the_days_before():
    window, returns = 40, PRICES.close[1:] / PRICES.close[:-1] - 1
    found = market.turbulence_indicators(PRICES.close, window)
    assert not found[: window + 1].any()
    for day in range(window + 1, len(PRICES)):
        past, now = returns[day - 1 - window : day - 1], returns[day - 1]
        away = now - past.mean(0)
        np.testing.assert_allclose(found[day], away @ np.linalg.inv(np.cov(past.T)) @ away, rtol=1e-9)


def test_turbulence_with_symbols_that_move_alike_or_too_few_days():
    twice = np.concatenate([PRICES.close, PRICES.close], axis=1)
    np.testing.assert_allclose(
        market.turbulence_indicators(twice, 40), market.turbulence_indicators(PRICES.close, 40), rtol=1e-6
    )
    assert not market.turbulence_indicators(PRICES.close[:41], 40).any()


def test_prices_that_stand_still_have_quiet_indicators():
    still = np.full((50, 2), 7.3)
    assert not market.macd(still).any()
    assert (market.rsi(still, 14) == 50).all()
    assert not market.cci(still, still, still, 20).any()
    assert not market.adx(still, still, still, 14).any()


@pytest.mark.parametrize("name", INDICATORS)
def test_no_indicator_knows_the_future(name):
    day, shuffled = 70, draw_prices(1, symbols=3, days=120)
    order = np.random.default_rng(0).permutation(np.arange(day + 1, 120))
    for table in (shuffled.open, shuffled.high, shuffled.low, shuffled.close):
        table[day + 1 :] = table[order]
    now, then = INDICATORS[name](PRICES), INDICATORS[name](shuffled)
    assert np.array_equal(now[: day + 1], then[: day + 1])
    assert not np.array_equal(now[day + 1 :], then[day + 1 :])
