"""Builds a group of trading environments from --data-dir and data.args."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from multigpu_cli.errors import RequestError
from multigpu_cli.trading import prices
from multigpu_cli.trading.environment import Trading, TradingRules
from multigpu_cli.trading.market import build


def group(
    split: str,
    data_dir: str | None,
    numbers: Sequence[int],
    seed: int,
    device: torch.device,
    symbols: Sequence[str] | str | int | None = None,
    adjusted: bool = True,
    made_days: int = 1500,
    made_seed: int = 0,
    val_from: Any = None,
    test_from: Any = None,
    window: int | None = None,
    length: int | None = None,
    start: str = "random",
    cash: float = 1_000_000.0,
    max_shares: int = 100,
    cost: float = 0.001,
    turbulence: float | None = 0.9,
    turbulence_window: int = 252,
    period: int = 30,
    fill: str = "close",
    reward_scale: float = 1e-4,
) -> Trading:
    """Build trading environments on the dates of a split; val and test run from their first date to their last.

    Args:
        data_dir: folder of CSV files, one per symbol; None uses synthetic prices, as the plan says.
        symbols: names of the files (default: all); the number of synthetic symbols (default: 5).
        adjusted: see prices.read_prices.
        made_days, made_seed: number of days and seed of the synthetic prices, which do not depend on --seed.
        val_from, test_from, turbulence, turbulence_window, period, fill: see market.build.
        length, start, window, cash, max_shares, cost, reward_scale: see TradingRules; the first two are for training.
    """
    _check(locals())
    training = split == "train"
    market = build(
        _prices(data_dir, symbols, adjusted, made_days, made_seed),
        window=window or 1,
        period=period,
        turbulence=turbulence,
        turbulence_window=turbulence_window,
        fill=fill,
        val_from=val_from,
        test_from=test_from,
    )
    rules = TradingRules(
        cash=float(cash),
        max_shares=max_shares,
        cost=cost,
        reward_scale=reward_scale,
        length=length if training else None,
        start=start if training else "beginning",
        window=window,
    )
    return Trading(market, rules, market.days[split], numbers, seed, device, recording=not training)


def _prices(
    data_dir: str | None, symbols: Sequence[str] | str | int | None, adjusted: bool, days: int, seed: int
) -> prices.Prices:
    if data_dir is None:
        if symbols is not None and not isinstance(symbols, int):
            raise RequestError(
                "data.args.symbols: synthetic prices have no names", remedy="give --data-dir, or a number of symbols"
            )
        return prices.draw_prices(seed, 5 if symbols is None else symbols, days)
    if isinstance(symbols, int):
        raise RequestError(f"data.args.symbols: {symbols} is not the name of a file", remedy="give names, without .csv")
    return prices.read_prices(data_dir, symbols or (), adjusted=adjusted)


def _check(given: Mapping[str, Any]) -> None:
    def whole(name: str, least: int) -> bool:
        return isinstance(given[name], int) and not isinstance(given[name], bool) and given[name] >= least

    def number(name: str, low: float, high: float) -> bool:
        return isinstance(given[name], int | float) and not isinstance(given[name], bool) and low <= given[name] <= high

    rules = [
        ("window", given["window"] is None or whole("window", 1), "1 or more days, or null"),
        ("length", given["length"] is None or whole("length", 1), "1 or more days, or null"),
        ("start", given["start"] in ("random", "beginning"), "random or beginning"),
        ("cash", number("cash", 1e-6, 1e15), "an amount above 0"),
        ("max_shares", whole("max_shares", 1), "1 or more"),
        ("cost", number("cost", 0, 0.999), "a share from 0 to below 1"),
        ("turbulence", given["turbulence"] is None or number("turbulence", 0, 1), "a quantile, or null"),
        ("turbulence_window", whole("turbulence_window", 2), "2 or more days"),
        ("period", whole("period", 2), "2 or more days"),
        ("fill", given["fill"] in ("close", "open"), "close, or open for that of the next day"),
        ("reward_scale", number("reward_scale", 1e-12, 1e12), "a number above 0"),
    ]
    for name, holds, right in rules:
        if not holds:
            raise RequestError(f"data.args.{name}: {given[name]!r} is not valid", remedy=f"use {right}")
