"""The market data of trading environments: tables with one row per day, indicators, and the days of each split.

Each indicator depends only on its day and the days before it. All map (T, n) float64 to (T, n): T days, n symbols.
Smoothing starts from the first value, so early days are imprecise.
"""

from dataclasses import dataclass
from datetime import date
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from multigpu_cli.errors import RequestError
from multigpu_cli.trading.prices import Prices

SHARES = (0.7, 0.15, 0.15)  # of the dates, for train, val and test; the default
_USUAL_DAY = 0.02  # a return of about one deviation; scales returns and MACD to the order of 1
_FEATURES = 5


@dataclass(frozen=True)
class Market:
    """Daily tables of n symbols on T dates.

    The features of a day are for each symbol its log return over 0.02, its MACD over 0.02 of its price, (RSI - 50) /
    50, CCI / 100, ADX / 50; then the square root of turbulence / n. They depend only on the day and the days before it,
    not on statistics of the whole period.
    """

    symbols: tuple[str, ...]
    dates: tuple[date, ...]
    close: np.ndarray  # (T, n), the price of a share at the end of a day
    fill: np.ndarray  # (T, n), the price at which an order of the day is executed
    features: np.ndarray  # (T, 5 n + 1)
    stopped: np.ndarray  # (T,) bool, days of high turbulence, on which all shares are sold and none bought
    days: dict[str, tuple[int, int]]  # the first and the last day of each split
    remark: str  # a description of the prices

    @cached_property
    def mark(self) -> int:
        """63 bits of a checksum of prices and splits."""
        content = [self.close.tobytes(), self.fill.tobytes(), repr((self.symbols, self.dates, self.days)).encode()]
        return int.from_bytes(sha256(b"".join(content)).digest()[:8]) >> 1

    def describe(self) -> str:
        """A description of prices and splits, which the plan shows."""
        spans = (f"{name} {self.dates[first]} to {self.dates[last]}" for name, (first, last) in self.days.items())
        return "; ".join([self.remark, *spans])


def build(
    prices: Prices,
    *,
    window: int = 1,  # days in an observation; training begins where that many are available
    period: int = 30,  # days of RSI, CCI and ADX, as in FinRL; the first 2 · period dates only warm them up
    turbulence: float | None = 0.9,  # days above this quantile of the training dates' are stopped; None stops no day
    turbulence_window: int = 252,  # days that a day's returns are compared with
    fill: str = "close",  # an order of a day is executed at its close, or at the open of the next day
    val_from: Any = None,  # first date of validation (default: 70 % of the dates are before it)
    test_from: Any = None,  # first date of test (default: the last 15 %)
) -> Market:
    """Compute indicators, splits and days of high turbulence."""
    unrest = turbulence_indicators(prices.close, turbulence_window)
    days = _split(prices.dates, max(window - 1, 2 * period), val_from, test_from)
    threshold = np.inf if turbulence is None else _threshold(unrest, days["train"], turbulence, turbulence_window)
    return Market(
        symbols=prices.symbols,
        dates=prices.dates,
        close=prices.close,
        fill=prices.close if fill == "close" else np.concatenate([prices.open[1:], prices.close[-1:]]),
        features=_features(prices, unrest, period),
        stopped=unrest > threshold,
        days=days,
        remark=prices.remark,
    )


def _features(prices: Prices, unrest: np.ndarray, period: int) -> np.ndarray:
    high, low, close = prices.high, prices.low, prices.close
    columns = [
        np.diff(np.log(close), axis=0, prepend=np.log(close[:1])) / _USUAL_DAY,
        macd(close) / close / _USUAL_DAY,
        (rsi(close, period) - 50) / 50,
        cci(high, low, close, period) / 100,
        adx(high, low, close, period) / 50,
    ]
    by_symbol = np.stack(columns, axis=2).reshape(len(prices), _FEATURES * len(prices.symbols))
    return np.concatenate([by_symbol, np.sqrt(unrest / len(prices.symbols))[:, None]], axis=1)


def _threshold(unrest: np.ndarray, train: tuple[int, int], quantile: float, window: int) -> float:
    known = unrest[max(train[0], window + 1) : train[1] + 1]
    if not len(known):
        problem = f"data.args.turbulence_window: no training date has {window} days of returns before it"
        raise RequestError(problem, remedy="use a smaller value, or --set data.args.turbulence=null to stop no day")
    return float(np.quantile(known, quantile))


def _split(dates: tuple[date, ...], first: int, val_from: Any, test_from: Any) -> dict[str, tuple[int, int]]:
    """The first and last day of each split; days before `first` are in none."""
    usable = max(0, len(dates) - first)
    places = [_place(name, dates, given) for name, given in (("val_from", val_from), ("test_from", test_from))]
    by_share = [first + round(usable * share) for share in (SHARES[0], SHARES[0] + SHARES[1])]
    val, test = (share if place is None else place for place, share in zip(places, by_share, strict=True))
    spans = {"train": (first, val - 1), "val": (val, test - 1), "test": (test, len(dates) - 1)}
    for name, (begin, end) in spans.items():
        if end <= begin:
            what = f"from {dates[begin]}" if begin < len(dates) else "at the end"
            raise RequestError(
                f"--data trading: {name} has less than two dates {what}; there are {len(dates)} from {dates[0]} to "
                f"{dates[-1]}, and the first {first} only warm up the indicators",
                remedy="change data.args.val_from and test_from, use a smaller data.args.period, or more prices",
            )
    return spans


def _place(name: str, dates: tuple[date, ...], given: Any) -> int | None:
    """The first day on or after a date; None if no date is given."""
    if given is None:
        return None
    try:
        wanted = date.fromisoformat(str(given))
    except ValueError as error:
        raise RequestError(
            f"data.args.{name}: {given!r} is not a date", remedy="use a date such as 2016-01-04"
        ) from error
    return sum(day < wanted for day in dates)


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Exponential smoothing with this weight of the new value."""
    found = np.empty_like(values)
    found[0] = values[0]
    for day in range(1, len(values)):
        found[day] = found[day - 1] + weight * (values[day] - found[day - 1])
    return found


def macd(close: np.ndarray, fast: int = 12, slow: int = 26) -> np.ndarray:
    """Moving average convergence divergence (Appel): the fast exponential average less the slow one, in price units."""
    difference: np.ndarray = smooth(close, 2 / (fast + 1)) - smooth(close, 2 / (slow + 1))
    return difference


def rsi(close: np.ndarray, period: int) -> np.ndarray:
    """Relative strength index (Wilder 1978), 0 … 100; 50 where prices are constant."""
    change = np.diff(close, axis=0, prepend=close[:1])
    gain, loss = (smooth(np.maximum(moved, 0), 1 / period) for moved in (change, -change))
    return 100 * _share(gain, gain + loss, 0.5)


def cci(high: np.ndarray, low: np.ndarray, close: np.ndarray, period: int) -> np.ndarray:
    """Commodity channel index (Lambert 1980): typical price over its mean, in 0.015 mean absolute deviations.

    Days before the first full period use the first price for the days that are missing.
    """
    typical = (high + low + close) / 3
    before = np.repeat(typical[:1], period - 1, axis=0)
    windows = sliding_window_view(np.concatenate([before, typical]), period, axis=0)  # (T, n, period)
    mean = windows.mean(axis=2)
    deviation = np.abs(windows - mean[..., None]).mean(axis=2)
    flat = deviation <= 1e-12 * typical  # equal prices, up to rounding
    return np.where(flat, 0.0, (typical - mean) / np.where(flat, 1.0, 0.015 * deviation))


def adx(high: np.ndarray, low: np.ndarray, close: np.ndarray, period: int) -> np.ndarray:
    """Average directional index (Wilder 1978), 0 … 100: the strength of a trend in either direction."""
    before = np.concatenate([close[:1], close[:-1]])
    up, down = np.diff(high, axis=0, prepend=high[:1]), -np.diff(low, axis=0, prepend=low[:1])
    rising = np.where((up > down) & (up > 0), up, 0.0)
    falling = np.where((down > up) & (down > 0), down, 0.0)
    true_range = np.maximum(high, before) - np.minimum(low, before)
    spread = smooth(true_range, 1 / period)
    plus, minus = (_share(smooth(moved, 1 / period), spread, 0.0) for moved in (rising, falling))
    return smooth(100 * _share(np.abs(plus - minus), plus + minus, 0.0), 1 / period)


def turbulence_indicators(close: np.ndarray, window: int) -> np.ndarray:
    """(T,): turbulence (Kritzman and Li 2010), the squared Mahalanobis distance of a day's returns.

    Mean and covariance are those of the `window` days before; a day with fewer days before it has 0. For independent
    normal returns the mean is about n.
    """
    returns = close[1:] / close[:-1] - 1  # row t - 1 belongs to day t
    found = np.zeros(len(close))
    for day in range(1 + window, len(close)):
        past = returns[day - 1 - window : day - 1]
        mean = past.mean(axis=0)
        away, centred = returns[day - 1] - mean, past - mean
        covariance = centred.T @ centred / (window - 1)
        found[day] = away @ np.linalg.pinv(covariance, hermitian=True) @ away  # singular if symbols are correlated
    return np.maximum(found, 0)


def _share(part: np.ndarray, whole: np.ndarray, otherwise: float) -> np.ndarray:
    """part / whole, both ≥ 0; `otherwise` where the whole is 0."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), otherwise)
