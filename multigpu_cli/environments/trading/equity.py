"""Metrics of an equity curve, and of two baselines without a policy: buy and hold, and equal weights every day."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.environments.trading.market import Market

YEAR = 252  # trading days


def cumulative_return(values: Tensor) -> Tensor:
    """(…,): the gain over all days of values (…, T), as a share of the first one."""
    return values[..., -1] / values[..., 0] - 1


def max_drawdown(values: Tensor) -> Tensor:
    """(…,): the largest fall of values (…, T) from an earlier maximum, as a share of that maximum."""
    return (1 - values / values.cummax(-1).values).amax(-1)


def sharpe_ratio(values: Tensor) -> Tensor:
    """(…,): mean over deviation of the daily returns of values (…, T), times √252; 0 where values are constant.

    Sharpe (1994), with a risk-free rate of 0 and the sample deviation; 0 for fewer than two returns.
    """
    returns = values[..., 1:] / values[..., :-1] - 1
    if returns.shape[-1] < 2:
        return torch.zeros_like(values[..., 0])
    spread = returns.std(-1)
    moves = spread > 1e-12  # less is rounding
    return torch.where(moves, returns.mean(-1) / torch.where(moves, spread, 1.0) * sqrt(YEAR), 0.0)


def figures(values: Tensor) -> dict[str, Tensor]:
    """The three metrics of values (…, T) by name."""
    return {
        "cumulative_return": cumulative_return(values),
        "max_drawdown": max_drawdown(values),
        "sharpe_ratio": sharpe_ratio(values),
    }


def buy_and_hold(fill: Tensor, close: Tensor, cash: float, cost: float) -> Tensor:
    """(T,): the value of equal sums in each of n symbols, bought on the first day and held.

    Args:
        fill, close: (T, n), the price at which an order of that day is executed, and the price at the end of the day.
        cost: the cost of a trade, as a share of its value. Fractions of shares can be bought.
    """
    held = cash / fill.shape[1] / (fill[0] * (1 + cost))
    return torch.cat([close.new_tensor([cash]), close[1:] @ held])


def hold_equal_shares(fill: Tensor, close: Tensor, cash: float, cost: float) -> Tensor:
    """(T,): like `buy_and_hold`, but rebalanced to equal sums in each symbol every day, at the cost of the trades."""
    held, values = torch.zeros_like(fill[0]), [close.new_tensor(cash)]
    for prices, later in zip(fill[:-1], close[1:], strict=True):
        worths = held * prices
        purse = cash + worths.sum()  # the cash is spent on the first day
        held, cash = _rebalance(worths, purse, cost) / prices, 0.0
        values.append(held @ later)
    return torch.stack(values)


def _rebalance(worths: Tensor, total: Tensor, cost: float) -> Tensor:
    """(n,): equal sums s such that n s + cost · Σ |s - worth| = total."""
    share = total / len(worths)
    for _ in range(60):  # each iteration reduces the error by the factor `cost` at least
        paid = cost * (share - worths).abs().sum()
        share, last = (total - paid) / len(worths), share
        if share == last:
            break
    return share.expand_as(worths)


@dataclass(frozen=True)
class EquityCurves:
    """Three portfolios over the same dates, with the same initial cash.

    Attributes:
        dates: T dates.
        policy, buy_and_hold, equal_weight: (T,) float64 values.
        remark: a description of the prices.
    """

    dates: tuple[date, ...]
    policy: Tensor
    buy_and_hold: Tensor
    equal_weight: Tensor
    remark: str

    @classmethod
    def over(cls, market: Market, first: int, policy: Tensor, cash: float, cost: float) -> "EquityCurves":
        """A policy's values (T,) from a day of the market on, with those of the baselines."""
        days = slice(first, first + len(policy))
        fill, close = torch.from_numpy(market.fill[days]), torch.from_numpy(market.close[days])
        once, equal = buy_and_hold(fill, close, cash, cost), hold_equal_shares(fill, close, cash, cost)
        return cls(market.dates[days], policy, once, equal, market.remark)

    def iterate_curves(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("policy", self.policy), ("buy_and_hold", self.buy_and_hold), ("equal_weight", self.equal_weight))

    def as_dict(self) -> dict[str, Any]:
        """The dates, the values of each portfolio and the remark, as plain values."""
        values = {name: found.tolist() for name, found in self.iterate_curves()}
        return {"dates": [str(day) for day in self.dates], "values": values, "prices": self.remark}

    def rivals(self) -> dict[str, float]:
        """Metrics of the two baselines, by name."""
        found: dict[str, float] = {}
        for rival, values in list(self.iterate_curves())[1:]:
            found |= {f"{rival}_{name}": float(value) for name, value in figures(values).items()}
        return found
