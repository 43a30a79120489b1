"""Synthetic daily prices, for trials without real ones."""

from datetime import date, timedelta
from math import sqrt

import numpy as np

from multigpu_cli.environments.trading.prices import Prices
from multigpu_cli.errors import RequestError

_DRIFT, _MARKET, _OWN = 0.08, 0.12, 0.20  # per year: mean growth, deviation common to all symbols, and of each symbol
_TRADING_DAYS = 252
_FIRST = date(2000, 1, 3)


def draw_prices(seed: int, symbols: int = 5, days: int = 1500) -> Prices:
    """Geometric Brownian motion with one common factor: the past does not predict the future.

    A policy's return on such prices beyond their drift is chance.

    Raises:
        RequestError: a size is out of range.
    """
    for name, value, least in (("symbols", symbols, 1), ("days", days, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise RequestError(f"data.args.{name}: {value!r} is not valid", remedy=f"use {least} or more")
    random = np.random.default_rng([seed, symbols, days])
    market, own = _MARKET / sqrt(_TRADING_DAYS), _OWN / sqrt(_TRADING_DAYS)
    shocks = market * random.standard_normal((days, 1)) + own * random.standard_normal((days, symbols))
    drift = (_DRIFT - (_MARKET**2 + _OWN**2) / 2) / _TRADING_DAYS
    close = np.log(100.0) + np.cumsum(drift + shocks, axis=0)
    opened = np.vstack([close[:1], close[:-1]]) + 0.3 * own * random.standard_normal((days, symbols))
    reach = 0.5 * own * np.abs(random.standard_normal((2, days, symbols)))  # beyond opening and close
    high, low = np.maximum(opened, close) + reach[0], np.minimum(opened, close) - reach[1]
    return Prices(
        tuple(f"MADE{number + 1}" for number in range(symbols)),
        tuple(_FIRST + timedelta(days=7 * (day // 5) + day % 5) for day in range(days)),
        open=np.exp(opened),
        high=np.exp(high),
        low=np.exp(low),
        close=np.exp(close),
        remark=f"synthetic: geometric Brownian motion, {symbols} symbols, {days:,} dates; no real market",
    )
