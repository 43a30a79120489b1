"""Daily prices of several symbols: read from a folder of CSV files, one for each, or made."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from math import sqrt
from pathlib import Path

import numpy as np

from multigpu_cli.config.regular_files import refuse_special_file
from multigpu_cli.errors import RequestError, did_you_mean, pluralize, raise_all

_COLUMNS = ("open", "high", "low", "close")
_ADJUSTED = ("adj close", "adj_close", "adjclose", "adjusted close")
_LAYOUT = "use one CSV file per symbol, with columns Date, Open, High, Low, Close and one line per day, oldest first"


@dataclass(frozen=True)
class Prices:
    """Prices (T, n) float64 of n symbols on T dates on which all were traded, oldest first; `remark`: their origin."""

    symbols: tuple[str, ...]
    dates: tuple[date, ...]
    open: np.ndarray
    high: np.ndarray
    low: np.ndarray
    close: np.ndarray
    remark: str = ""

    def __len__(self) -> int:
        return len(self.dates)


def read_prices(data_dir: str, symbols: Sequence[str] = (), *, adjusted: bool = True) -> Prices:
    """Read the files of a folder, on the dates that all of them have.

    The symbols are names of the files, without .csv, in the order of the actions; empty for all, sorted by name.
    Adjusted, all prices of a day are multiplied by Adj Close / Close if every file has that column, so that dividends
    count as gains. The factor depends on later dividends, so features must use ratios of prices only.
    """
    files = _files(Path(data_dir).expanduser(), symbols)
    tables, faults = [], []
    for file in files:
        try:
            tables.append(_table(file))
        except RequestError as fault:
            faults.append(fault)
    raise_all(faults)
    common = sorted(set.intersection(*(set(table) for table in tables)))
    if len(common) < 2:
        spans = "\n".join(f"  {file}: {min(table)} to {max(table)}" for file, table in zip(files, tables, strict=True))
        raise RequestError(
            f"--data trading: the symbols share {pluralize(len(common), 'date')}\n{spans}",
            remedy="use --set data.args.symbols=[…] with symbols that were traded on the same dates",
        )
    rows = np.array([[table[day] for table in tables] for day in common])  # (T, n, 5)
    with_dividends = adjusted and bool(np.isfinite(rows[..., 4]).all())
    factor = rows[..., 4] / rows[..., 3] if with_dividends else 1.0
    left_out = max(map(len, tables)) - len(common)
    remark = f"{pluralize(len(files), 'symbol')}, {pluralize(len(common), 'date')}, {common[0]} to {common[-1]}"
    remark += ", adjusted for dividends" if with_dividends else ", without dividends"
    remark += f"; {pluralize(left_out, 'date')} left out, which not all symbols have" if left_out else ""
    opened, high, low, close = (rows[..., at] * factor for at in range(len(_COLUMNS)))
    names = tuple(file.stem for file in files)
    return Prices(names, tuple(common), open=opened, high=high, low=low, close=close, remark=remark)


def _files(folder: Path, symbols: Sequence[str]) -> list[Path]:
    if not folder.is_dir():
        raise RequestError(f"--data-dir {folder} is not a folder", remedy=_LAYOUT)
    there = {path.stem: path for path in sorted(folder.glob("[!.]*.csv"))}
    if not there:
        raise RequestError(f"--data trading: {folder} contains no .csv file", remedy=_LAYOUT)
    chosen = [symbols] if isinstance(symbols, str) else [str(symbol) for symbol in symbols]
    for symbol in chosen:
        if symbol not in there:
            raise RequestError(
                f"data.args.symbols: {folder} contains no {symbol}.csv", remedy=did_you_mean(symbol, there)
            )
    if len(set(chosen)) < len(chosen):
        raise RequestError(
            f"data.args.symbols: {', '.join(chosen)} names a symbol twice", remedy="name each symbol once"
        )
    return [there[symbol] for symbol in chosen] or list(there.values())


def _table(file: Path) -> dict[date, tuple[float, ...]]:
    """Open, high, low, close and adjusted close (NaN if the file has none) by date."""
    found: dict[date, tuple[float, ...]] = {}
    refuse_special_file(file)
    try:
        with open(file, newline="", encoding="utf-8-sig") as text:
            lines = csv.reader(text)
            head = [name.strip().lower() for name in next(lines, [])]
            places = _places(file, head)
            last: date | None = None
            for row in lines:
                if not row:
                    continue
                where = f"{file}:{lines.line_num}"
                if len(row) != len(head):
                    raise _wrong(where, f"{pluralize(len(row), 'cell')} for {pluralize(len(head), 'column')}")
                day = _day(where, row[places[0]])
                if last is not None and day <= last:
                    fault = "is repeated" if day == last else f"comes after {last}"
                    raise _wrong(where, f"{day} {fault}", "use one line per day, oldest first; remove intraday prices")
                found[day] = _numbers(where, row, places[1:])
                last = day
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _wrong(str(file), str(error), "use a CSV file in UTF-8") from error
    if not found:
        raise _wrong(str(file), "contains no prices")
    return found


def _places(file: Path, head: list[str]) -> list[int]:
    """The columns of date and prices; -1 if there is no adjusted close."""
    missing = [name.title() for name in ("date", *_COLUMNS) if name not in head]
    if missing:
        fault = f"has no column {', '.join(missing)}; it has {', '.join(head) or 'none'}"
        raise _wrong(f"{file}:1", fault, f"{_LAYOUT}; data.args.symbols=[…] leaves other files out")
    adjusted = next((head.index(name) for name in _ADJUSTED if name in head), -1)
    return [*(head.index(name) for name in ("date", *_COLUMNS)), adjusted]


def _day(where: str, cell: str) -> date:
    try:
        return date.fromisoformat(cell.strip()[:10])  # some files have a time of day after it
    except ValueError as error:
        raise _wrong(where, f"{cell!r} is not a date", "use dates such as 2017-09-01") from error


def _numbers(where: str, row: list[str], places: list[int]) -> tuple[float, ...]:
    values = []
    for place in places:
        try:
            is_plain = row[place].isascii() and "_" not in row[place]  # float() also reads 1_1 and other digits
            value = float(row[place] if is_plain else "") if place >= 0 else math.nan
        except ValueError:
            value = 0.0
        if place >= 0 and not 0 < value < math.inf:
            raise _wrong(where, f"{row[place]!r} is not a price above 0", "correct the price, or remove the line")
        values.append(value)
    if values[2] > values[1]:
        fault = f"the low {values[2]:g} is above the high {values[1]:g}"
        raise _wrong(where, fault, "correct the prices, or remove the line")
    return tuple(values)


def _wrong(where: str, fault: str, remedy: str = _LAYOUT) -> RequestError:
    return RequestError(f"--data trading: {where}: {fault}", remedy=remedy)


_DRIFT, _MARKET, _OWN = 0.08, 0.12, 0.20  # per year: mean growth, deviation common to all symbols, and of each symbol
_TRADING_DAYS = 252
_FIRST = date(2000, 1, 3)


def draw_prices(seed: int, symbols: int = 5, days: int = 1500) -> Prices:
    """Geometric Brownian motion with one common factor: a policy's return on it beyond the drift is chance."""
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
