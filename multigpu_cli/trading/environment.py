"""A portfolio of several symbols, traded once a day, a group by the same tensor ops; its value beside plain ones.

The rules are those of FinRL and of Zou et al. (arXiv 2212.02721): an action in -1 … 1 per symbol is a number of shares
to sell or buy, sales come before purchases, costs are a share of the traded value, and on days of high turbulence all
shares are sold. If the cash does not suffice, all purchases are reduced in proportion and rounded down to whole shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.environments.base import Box, EnvironmentGroup, StepReturn
from multigpu_cli.planning.batch import make_key
from multigpu_cli.trading.market import Market

_ALL = 1e18  # shares; an order to sell all of them
_LEAST = 1e-300  # cash is never 0, so that 0/0 does not occur when nothing is bought
_AHEAD = 64  # days whose table rows are gathered together


@dataclass(frozen=True, kw_only=True)
class TradingRules:
    """The rules of an episode."""

    cash: float = 1_000_000.0
    max_shares: int = 100  # shares of a symbol that an action of 1 buys and an action of -1 sells
    cost: float = 0.001  # the cost of a trade, as a share of its value
    reward_scale: float = 1e-4  # the reward is the change of the portfolio's value times this factor
    length: int | None = None  # days of an episode; None for the whole split
    start: str = "random"  # where a shorter one begins: at a random date, or at the split's first one
    window: int | None = None  # days in an observation, (window, features); None for (features,) of the last day


class Trading(EnvironmentGroup):
    """Observations are the day's features (see Market), then the shares of the portfolio in cash and in each symbol.

    All episodes have the same length, so those of a group begin and end together. They are truncated at their last
    date, whose state has a value. Observations are views of a buffer that is not written again. The baselines' metrics
    are those of the first environment's dates.
    """

    _first: Tensor  # (E,) day on which the episode began
    _cash: Tensor  # (E,)
    _held: Tensor  # (E, n) shares of each symbol
    _worth: Tensor  # (E,) cash and shares
    _trades: Tensor  # (E,) orders executed in this episode
    _values: Tensor  # (E, days + 1) worth on each day of it

    def __init__(
        self,
        market: Market,
        rules: TradingRules,
        span: tuple[int, int],  # first and last day of the split
        numbers: Sequence[int],
        seed: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,  # of observations and rewards; money is float64 throughout
        recording: bool = False,  # store values and count trades, for the metrics; else only the return is known
    ) -> None:
        self.market, self._rules, self._span, self._numbers, self._seed = market, rules, span, tuple(numbers), seed
        self._device, self._dtype, self._recording = device, dtype, recording
        self._days = min(rules.length or span[1] - span[0], span[1] - span[0])  # of an episode
        self._fill, self._close = (torch.from_numpy(each).to(device) for each in (market.fill, market.close))
        self._forced = -_ALL * torch.from_numpy(market.stopped)[:, None].to(device, torch.float64)
        self._features = torch.from_numpy(market.features).to(device, dtype)
        count = len(market.symbols)
        shape = (self._features.shape[1] + 1 + count,)
        self.observation_shape = shape if rules.window is None else (rules.window, *shape)
        self.action, self.remark = Box((count,), -1.0, 1.0), market.describe()
        each = torch.ones(count, dtype=torch.float64, device=device)
        self._each, self._bids, self._asks = each, (1 - rules.cost) * each, (1 + rules.cost) * each
        self._nobody = torch.zeros(len(self._numbers), dtype=torch.bool, device=device)
        self._figures: dict[str, Tensor] = {}
        self._curves: EquityCurves | None = None

    def reset(self) -> Tensor:
        return self._begin_episodes(0)

    def step(self, actions: Tensor) -> StepReturn:
        self._trade(actions)
        self._elapsed += 1
        ahead = self._elapsed - self._looked
        values = self._held * self._closes[ahead]
        worth = torch.addmv(self._cash, values, self._each)
        torch.div(self._cash, worth, out=self._in_cash[ahead])
        torch.div(values, worth[:, None], out=self._in_symbols[ahead])
        reward = worth.sub(self._worth).mul_(self._rules.reward_scale).to(self._dtype)
        self._worth, observation = worth, self._observations[ahead]
        if self._recording:
            self._values[:, self._elapsed] = worth
        if self._elapsed == self._days:
            self._figures = self._compute_figures()
            return StepReturn(self._begin_episodes(self._episode + 1), reward, self._nobody, ~self._nobody, observation)
        if ahead == _AHEAD:
            self._look_ahead(self._shares())
        return StepReturn(observation, reward, self._nobody, self._nobody, observation)

    def _trade(self, actions: Tensor) -> None:
        """Execute the day's orders: sales, then as many purchases as the cash allows."""
        ahead = self._elapsed - self._looked
        prices = self._fills[ahead]
        wanted = torch.add(self._forces[ahead], actions.double(), alpha=self._rules.max_shares).trunc_()
        change = torch.maximum(wanted, -self._held)
        bought = change.clamp(min=0)
        sold = change - bought
        cash = torch.addmv(self._cash, sold * prices, self._bids, alpha=-1)
        enough = (cash / (bought * prices).mv(self._asks)).clamp_(max=1)
        bought.mul_(enough[:, None]).floor_()
        self._cash = torch.addmv(cash, bought * prices, self._asks, alpha=-1).clamp_(min=_LEAST)
        change = sold.add_(bought)
        self._held = self._held + change
        if self._recording:
            self._trades.add_(change.count_nonzero(1))

    def _begin_episodes(self, episode: int) -> Tensor:
        """Begin this episode in all environments, with cash only; returns the first observations."""
        count, symbols = len(self._numbers), len(self._each)
        self._episode, self._elapsed = episode, 0
        beginnings = self._span[1] - self._days - self._span[0] + 1 if self._rules.start == "random" else 1
        days = [self._span[0] + make_key(self._seed, number, episode) % beginnings for number in self._numbers]
        self._first = torch.tensor(days, device=self._device)
        self._cash = torch.full((count,), self._rules.cash, dtype=torch.float64, device=self._device)
        self._held, self._worth = self._cash.new_zeros(count, symbols), self._cash
        self._trades = torch.zeros(count, dtype=torch.int64, device=self._device)
        self._values = self._cash.new_zeros(count, self._days + 1 if self._recording else 1)
        self._values[:, 0] = self._cash
        shares = torch.zeros(count, self._rules.window or 1, 1 + symbols, dtype=self._dtype, device=self._device)
        shares[..., 0] = 1
        return self._look_ahead(shares)

    def _look_ahead(self, shares: Tensor) -> Tensor:
        """Gather the table rows of the next days and allocate their observations; returns this day's observation.

        `shares` (E, window, 1 + n) are those of the portfolios in cash and each symbol, up to this day.
        """
        window, self._looked = shares.shape[1], self._elapsed
        ahead = min(_AHEAD, self._days - self._elapsed)
        days = self._first + self._elapsed + torch.arange(1 - window, ahead + 1, device=self._device)[:, None]
        later = days[window - 1 :]  # (1 + ahead, E)
        self._fills, self._closes, self._forces = (
            _rows(table, later).unbind() for table in (self._fill, self._close, self._forced)
        )
        seen = _rows(self._features, days.T)
        held = torch.cat([shares, shares.new_zeros(len(shares), ahead, shares.shape[2])], dim=1)
        buffer = torch.cat([seen, held], dim=2)
        views = buffer if self._rules.window is None else buffer.unfold(1, window, 1).mT
        self._observations, self._held_so_far = views.unbind(1), buffer[..., seen.shape[2] :]
        self._in_cash = self._held_so_far[:, window - 1 :, 0].unbind(1)
        self._in_symbols = self._held_so_far[:, window - 1 :, 1:].unbind(1)
        return self._observations[0]

    def _shares(self) -> Tensor:
        """(E, window, 1 + n): the shares of the portfolios in cash and each symbol, up to this day."""
        ahead = self._elapsed - self._looked
        return self._held_so_far[:, ahead : ahead + (self._rules.window or 1)]

    def _compute_figures(self) -> dict[str, Tensor]:
        """Metrics of the episodes that have just ended."""
        if not self._recording:
            return {"cumulative_return": self._worth / self._rules.cash - 1}
        self._curves = EquityCurves.over(
            self.market, int(self._first[0]), self._values[0].cpu(), self._rules.cash, self._rules.cost
        )
        baselines = {name: torch.full_like(self._worth, value) for name, value in self._curves.rivals().items()}
        return figures(self._values) | {"trades": self._trades} | baselines

    def figures(self) -> dict[str, Tensor]:
        return self._figures

    def details(self) -> dict[str, Any]:
        return {"equity_curve": self._curves.as_dict()} if self._curves else {}

    def state(self) -> dict[str, Tensor]:
        row = [self._episode, self._elapsed, self._days, self.market.mark]
        numbers = torch.tensor([row], device=self._device).repeat(len(self._numbers), 1)
        money = {"cash": self._cash, "held": self._held, "worth": self._worth, "values": self._values}
        found = {"numbers": numbers, "first": self._first, "trades": self._trades, "shares": self._shares()} | money
        return {name: tensor.clone() for name, tensor in found.items()}

    def load_state(self, state: dict[str, Tensor]) -> tuple[Tensor, int]:
        there = {name: tensor.to(self._device, copy=True) for name, tensor in state.items()}
        self._episode, self._elapsed, days, mark = there["numbers"][0].tolist()
        if (days, mark) != (self._days, self.market.mark):  # the prices have changed since
            return self._begin_episodes(self._episode), len(self._numbers)
        self._first, self._trades, self._values = there["first"], there["trades"], there["values"]
        self._cash, self._held, self._worth = there["cash"], there["held"], there["worth"]
        return self._look_ahead(there["shares"]), 0


def _rows(table: Tensor, days: Tensor) -> Tensor:
    """(…, columns): the rows of a table for days (…)."""
    return table.index_select(0, days.flatten()).view(*days.shape, -1)


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
    """(T,): the value of equal sums in each of n symbols, bought on the first day and held, also as fractions of
    shares.

    `fill` and `close` (T, n) are the prices at which an order of that day is executed, and at the end of the day;
    `cost` is a share of a trade's value.
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
    """The values (T,) float64 of three portfolios over the same dates, with the same initial cash."""

    dates: tuple[date, ...]
    curves: dict[str, Tensor]
    remark: str

    @classmethod
    def over(cls, market: Market, first: int, policy: Tensor, cash: float, cost: float) -> "EquityCurves":
        """A policy's values (T,) from a day of the market on, with those of the baselines."""
        days = slice(first, first + len(policy))
        fill, close = torch.from_numpy(market.fill[days]), torch.from_numpy(market.close[days])
        rivals = {"buy_and_hold": buy_and_hold, "equal_weight": hold_equal_shares}
        others = {name: invest(fill, close, cash, cost) for name, invest in rivals.items()}
        return cls(market.dates[days], {"policy": policy} | others, market.remark)

    def as_dict(self) -> dict[str, Any]:
        """The dates, the values of each portfolio and the remark, as plain values."""
        values = {name: found.tolist() for name, found in self.curves.items()}
        return {"dates": [str(day) for day in self.dates], "values": values, "prices": self.remark}

    def rivals(self) -> dict[str, float]:
        """Metrics of the two baselines, by name."""
        rivals = {name: figures(values) for name, values in self.curves.items() if name != "policy"}
        return {f"{rival}_{name}": float(value) for rival, found in rivals.items() for name, value in found.items()}
