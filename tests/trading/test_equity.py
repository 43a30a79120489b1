from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multigpu_cli.trading.environment import EquityCurves, buy_and_hold, cumulative_return, figures, hold_equal_shares
from multigpu_cli.trading.market import build
from multigpu_cli.trading.prices import draw_prices

CURVES = st.lists(st.floats(0.01, 1e6), min_size=2, max_size=40)


def slow_drawdown(values):
    return max(1 - later / earlier for at, earlier in enumerate(values) for later in values[at:])


def slow_sharpe(values):
    returns = [after / before - 1 for before, after in pairwise(values)]
    mean = sum(returns) / len(returns)
    spread = sqrt(sum((each - mean) ** 2 for each in returns) / (len(returns) - 1))
    return mean / spread * sqrt(252) if spread > 1e-12 else 0.0


def slow_equal_shares(fill, close, cash, cost):
    """By bisection: the equal sum of each symbol for which worth and costs add up."""
    held, values = [0.0] * len(fill[0]), [cash]
    for day in range(len(fill) - 1):
        worths = [count * price for count, price in zip(held, fill[day], strict=True)]
        total, low, high = cash + sum(worths), 0.0, cash + sum(worths)
        for _ in range(200):
            share = (low + high) / 2
            needed = len(worths) * share + cost * sum(abs(share - worth) for worth in worths)
            low, high = (share, high) if needed < total else (low, share)
        held, cash = [share / price for price in fill[day]], 0.0
        values.append(sum(count * price for count, price in zip(held, close[day + 1], strict=True)))
    return values


@settings(max_examples=60)
@given(CURVES)
def test_figures_equal_slow_loops(values):
    found = {name: float(value) for name, value in figures(torch.tensor(values, dtype=torch.float64)).items()}
    assert found["cumulative_return"] == pytest.approx(values[-1] / values[0] - 1, rel=1e-9, abs=1e-12)
    assert found["max_drawdown"] == pytest.approx(slow_drawdown(values), rel=1e-9, abs=1e-12)
    expected = slow_sharpe(values) if len(values) > 2 else 0.0
    assert found["sharpe_ratio"] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=60)
@given(CURVES, st.floats(0.001, 1000))
def test_figures_do_not_depend_on_the_currency(values, factor):
    plain = figures(torch.tensor([values, values], dtype=torch.float64))
    scaled = figures(torch.tensor([values, values], dtype=torch.float64) * factor)
    for name in plain:
        torch.testing.assert_close(plain[name], scaled[name], rtol=1e-6, atol=1e-6)
        assert plain[name].shape == (2,)


def test_a_curve_that_stands_still_or_only_rises():
    still, rising = torch.full((5,), 3.0, dtype=torch.float64), torch.arange(1.0, 6.0, dtype=torch.float64)
    assert [float(value) for value in figures(still).values()] == [0.0, 0.0, 0.0]
    assert figures(rising)["max_drawdown"] == 0
    assert cumulative_return(rising) == 4


@pytest.mark.parametrize("fill", ["close", "open"])
@pytest.mark.parametrize("cost", [0.0, 0.001, 0.3])
def test_rivals_equal_slow_loops(fill, cost):
    market = build(draw_prices(2, symbols=3, days=200), period=10, turbulence_window=20, fill=fill)
    fills, closes = market.fill[100:140], market.close[100:140]
    tensors = torch.from_numpy(fills), torch.from_numpy(closes)
    shares = [1000 / 3 / (price * (1 + cost)) for price in fills[0]]
    once = [1000.0] + [sum(np.multiply(shares, close)) for close in closes[1:]]
    np.testing.assert_allclose(buy_and_hold(*tensors, 1000.0, cost), once, rtol=1e-12)
    expected = slow_equal_shares(fills.tolist(), closes.tolist(), 1000.0, cost)
    np.testing.assert_allclose(hold_equal_shares(*tensors, 1000.0, cost), expected, rtol=1e-10)


def test_curves_cover_the_dates_of_the_policy():
    market = build(draw_prices(2, symbols=3, days=200), period=10, turbulence_window=20)
    curves = EquityCurves.over(market, 120, torch.full((30,), 500.0, dtype=torch.float64), 500.0, 0.001)
    assert curves.dates == market.dates[120:150]
    assert [len(values) for values in curves.curves.values()] == [30, 30, 30]
    assert set(curves.rivals()) == {
        f"{rival}_{figure}"
        for rival in ("buy_and_hold", "equal_weight")
        for figure in ("cumulative_return", "max_drawdown", "sharpe_ratio")
    }
