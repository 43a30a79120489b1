"""The rules of `trading` once more, one environment at a time: plain Python, for comparison and as a reference."""

from typing import Any

import gymnasium
import numpy as np

from multigpu_cli.trading.market import Market


class TradingLoop(gymnasium.Env[np.ndarray, np.ndarray]):
    """One portfolio over the days first … last of a market; trading/environment.py has the rules."""

    def __init__(
        self,
        market: Market,
        first: int,
        last: int,
        *,
        cash: float = 1_000_000.0,
        max_shares: int = 100,
        cost: float = 0.001,
        reward_scale: float = 1e-4,
        window: int | None = None,
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        self.market, self.first, self.last = market, first, last
        self.beginning_cash, self.max_shares, self.cost, self.reward_scale = cash, max_shares, cost, reward_scale
        self.window, self.dtype, self.symbols = window, dtype, len(market.symbols)
        self.fill, self.closing = market.fill.tolist(), market.close.tolist()
        self.features, self.stopped = market.features.astype(dtype), market.stopped.tolist()
        self.count = market.features.shape[1]
        features = self.count + 1 + self.symbols
        self.shape = (features,) if window is None else (window, features)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, self.shape)
        self.action_space = gymnasium.spaces.Box(-1, 1, (self.symbols,))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.day, self.cash, self.held, self.trades = self.first, self.beginning_cash, [0] * self.symbols, 0
        self.worth = self.cash
        self.shares = np.array([[1.0] + [0.0] * self.symbols] * (self.window or 1), dtype=self.dtype)
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        prices, wanted = self.fill[self.day], [int(float(each) * self.max_shares) for each in action]
        if self.stopped[self.day]:
            wanted = [-count for count in self.held]
        for symbol, count in enumerate(wanted):
            if count < 0:
                sold = min(-count, self.held[symbol])
                self.held[symbol] -= sold
                self.cash += sold * prices[symbol] * (1 - self.cost)
                self.trades += sold > 0
        bill = sum(count * prices[symbol] * (1 + self.cost) for symbol, count in enumerate(wanted) if count > 0)
        enough = min(1.0, self.cash / bill) if bill else 1.0
        self.shrunk = enough < 1
        for symbol, count in enumerate(wanted):
            if count > 0:
                bought = int(count * enough)
                self.held[symbol] += bought
                self.cash -= bought * prices[symbol] * (1 + self.cost)
                self.trades += bought > 0
        self.cash = max(0.0, self.cash)
        self.day += 1
        values = [count * price for count, price in zip(self.held, self.closing[self.day], strict=True)]
        worth = self.cash + sum(values)
        reward, self.worth = (worth - self.worth) * self.reward_scale, worth
        self.shares[:-1] = self.shares[1:]
        self.shares[-1] = [self.cash / worth] + [value / worth for value in values]
        return self._observation(), reward, False, self.day == self.last, {}

    def _observation(self) -> np.ndarray:
        seen = np.empty(self.shape, dtype=self.dtype)
        if self.window is None:
            seen[: self.count], seen[self.count :] = self.features[self.day], self.shares[0]
        else:
            seen[:, : self.count] = self.features[self.day + 1 - self.window : self.day + 1]
            seen[:, self.count :] = self.shares
        return seen
