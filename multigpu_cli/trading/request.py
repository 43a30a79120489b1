"""Builds a group of trading environments from --data-dir and data.args."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch

from multigpu_cli.config.types import choice, integer, number
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
    made_days: Annotated[int, integer(2)] = 1500,
    made_seed: int = 0,
    val_from: Any = None,
    test_from: Any = None,
    window: Annotated[int | None, integer(1)] = None,
    length: Annotated[int | None, integer(1)] = None,
    start: Annotated[str, choice("random", "beginning")] = "random",
    cash: Annotated[float, number(1e-6, 1e15)] = 1_000_000.0,
    max_shares: Annotated[int, integer(1)] = 100,
    cost: Annotated[float, number(0, 0.999)] = 0.001,
    turbulence: Annotated[float | None, number(0, 1)] = 0.9,
    turbulence_window: Annotated[int, integer(2)] = 252,
    period: Annotated[int, integer(2)] = 30,
    fill: Annotated[str, choice("close", "open")] = "close",
    reward_scale: Annotated[float, number(1e-12, 1e12)] = 1e-4,
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
    training = split == "train"
    history = _prices(data_dir, symbols, adjusted, made_days, made_seed)
    dates: dict[str, Any] = {"val_from": val_from, "test_from": test_from, "window": window or 1, "period": period}
    market = build(history, turbulence=turbulence, turbulence_window=turbulence_window, fill=fill, **dates)
    rules = TradingRules(cash=cash, max_shares=max_shares, cost=cost, reward_scale=reward_scale, window=window)
    if training:  # an evaluation runs from the split's first date to its last
        rules = replace(rules, length=length, start=start)
    return Trading(market, rules, market.days[split], numbers, seed, device, recording=not training)


def _prices(
    data_dir: str | None, symbols: Sequence[str] | str | int | None, adjusted: bool, days: int, seed: int
) -> prices.Prices:
    if data_dir is None:
        if symbols is not None and not isinstance(symbols, int):
            raise RequestError(
                "data.args.symbols: synthetic prices have no names", remedy="give --data-dir, or a number of symbols"
            )
        if symbols is not None and (isinstance(symbols, bool) or symbols < 1):
            raise RequestError(f"data.args.symbols: {symbols!r} is not valid", remedy="use 1 or more")
        return prices.draw_prices(seed, 5 if symbols is None else symbols, days)
    if isinstance(symbols, int):
        raise RequestError(f"data.args.symbols: {symbols} is not the name of a file", remedy="give names, without .csv")
    return prices.read_prices(data_dir, symbols or (), adjusted=adjusted)
