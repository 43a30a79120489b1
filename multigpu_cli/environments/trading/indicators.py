"""Technical indicators of daily prices; each depends only on its day and the days before it.

All map (T, n) float64 to (T, n): T days, n symbols. Smoothing starts from the first value, so early days are imprecise.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


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


def turbulence(close: np.ndarray, window: int) -> np.ndarray:
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
