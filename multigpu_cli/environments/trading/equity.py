"""Figures of an equity curve, and of two portfolios that need no policy: bought once, and equal shares every day."""

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
    """(…,): the largest fall of values (…, T) from a height reached before, as a share of that height."""
    return (1 - values / values.cummax(-1).values).amax(-1)


def sharpe_ratio(values: Tensor) -> Tensor:
    """(…,): mean over deviation of the daily returns of values (…, T), times √252; 0 where nothing moves.

    Sharpe (1994), with a riskless rate of 0 and the deviation of a sample; needs two returns at least, else 0.
    """
    returns = values[..., 1:] / values[..., :-1] - 1
    if returns.shape[-1] < 2:
        return torch.zeros_like(values[..., 0])
    spread = returns.std(-1)
    moves = spread > 1e-12  # less is rounding
    return torch.where(moves, returns.mean(-1) / torch.where(moves, spread, 1.0) * sqrt(YEAR), 0.0)


def figures(values: Tensor) -> dict[str, Tensor]:
    """The three of them by name, of values (…, T)."""
    return {
        "cumulative_return": cumulative_return(values),
        "max_drawdown": max_drawdown(values),
        "sharpe_ratio": sharpe_ratio(values),
    }


def buy_and_hold(fill: Tensor, close: Tensor, cash: float, cost: float) -> Tensor:
    """(T,): what equal sums in each of n symbols are worth, bought on the first day and kept.

    Args:
        fill, close: (T, n) what a share costs when an order of that day is carried out, and its worth at its end.
        cost: of a trade, as a share of its value. Parts of shares can be bought.
    """
    held = cash / fill.shape[1] / (fill[0] * (1 + cost))
    return torch.cat([close.new_tensor([cash]), close[1:] @ held])


def hold_equal_shares(fill: Tensor, close: Tensor, cash: float, cost: float) -> Tensor:
    """(T,): the same, brought back to equal sums in each symbol every day, and paying for it."""
    held, values = torch.zeros_like(fill[0]), [close.new_tensor(cash)]
    for prices, later in zip(fill[:-1], close[1:], strict=True):
        worths = held * prices
        purse = cash + worths.sum()  # the cash is spent on the first day
        held, cash = _rebalance(worths, purse, cost) / prices, 0.0
        values.append(held @ later)
    return torch.stack(values)


def _rebalance(worths: Tensor, total: Tensor, cost: float) -> Tensor:
    """(n,): the equal sums s that total pays for, so that n s + cost · Σ |s - worth| = total."""
    share = total / len(worths)
    for _ in range(60):  # each round is wrong by at most `cost` times what the last one was
        paid = cost * (share - worths).abs().sum()
        share, last = (total - paid) / len(worths), share
        if share == last:
            break
    return share.expand_as(worths)


@dataclass(frozen=True)
class EquityCurves:
    """Three portfolios over the same dates, from the same cash.

    Attributes:
        dates: T of them.
        policy, buy_and_hold, equal_weight: (T,) float64 values.
        remark: what the prices are.
    """

    dates: tuple[date, ...]
    policy: Tensor
    buy_and_hold: Tensor
    equal_weight: Tensor
    remark: str

    @classmethod
    def over(cls, market: Market, first: int, policy: Tensor, cash: float, cost: float) -> "EquityCurves":
        """A policy's values (T,) from a day of the market on, beside its rivals'."""
        days = slice(first, first + len(policy))
        fill, close = torch.from_numpy(market.fill[days]), torch.from_numpy(market.close[days])
        once, equal = buy_and_hold(fill, close, cash, cost), hold_equal_shares(fill, close, cash, cost)
        return cls(market.dates[days], policy, once, equal, market.remark)

    def iterate_curves(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("policy", self.policy), ("buy_and_hold", self.buy_and_hold), ("equal_weight", self.equal_weight))

    def as_dict(self) -> dict[str, Any]:
        """Plain values: the dates, what each portfolio was worth on them, and what the prices are."""
        values = {name: found.tolist() for name, found in self.iterate_curves()}
        return {"dates": [str(day) for day in self.dates], "values": values, "prices": self.remark}

    def rivals(self) -> dict[str, float]:
        """Figures of the two that need no policy, by name."""
        found: dict[str, float] = {}
        for rival, values in list(self.iterate_curves())[1:]:
            found |= {f"{rival}_{name}": float(value) for name, value in figures(values).items()}
        return found
