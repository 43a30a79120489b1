"""What a step of the trading environment costs, against a plain Python environment in a loop over 64 copies.

    python -m benchmarks.trading

The same rules, prices, first days and actions on both sides, in one process with one thread, in turns; CPU time for
each step. Ours steps in inference mode, as a rollout does. The plain one (benchmarks.trading_loop) has its
books in Python's own floats, which for five symbols is faster than NumPy. Prices are made up: what they are makes no
difference.
"""

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.paired_timing import Row, Seconds, alternate, program
from benchmarks.trading_loop import TradingLoop
from multigpu_cli.trading.environment import Trading
from multigpu_cli.trading.request import group

_COPIES, _DAYS = 64, 256
_STEPS = 64  # of a turn: whatever comes now and then is in it
_MANY = 512
_SETTINGS = ((5, None, None), (5, 30, None), (30, 30, 20))  # symbols, days in an observation, aim with few at once


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    rows = []
    for symbols, window, few in _SETTINGS[:1] if tiny else _SETTINGS:
        found = _measured(symbols, window, 2 if tiny else 14)
        what = f"trading, {symbols} symbols, " + (f"window of {window} days" if window else "last day alone")
        rows += [
            found.micro(f"{what}: an environment step, {_COPIES} at once", "ours", _COPIES * _STEPS),
            found.micro(f"{what}: an environment step, {_MANY} at once", "many", _MANY * _STEPS),
            found.micro(f"{what}: an environment step, loop over {_COPIES}", "loop", _COPIES * _STEPS),
            found.ratio(f"{what}: loop / ours, {_COPIES} at once", "loop", "ours", aim=few, at_least=True),
            found.ratio(f"{what}: loop / ours, {_MANY} at once", "loop", "each", aim=20, at_least=True),
        ]
    return rows


def _measured(symbols: int, window: int | None, turns: int) -> Seconds:
    few, many = _group(_COPIES, symbols, window), _group(_MANY, symbols, window)
    actions = torch.rand(_STEPS, _MANY, symbols, generator=torch.Generator().manual_seed(0)) * 2 - 1
    firsts = few.state()["first"].tolist()
    loops = [TradingLoop(few.market, first, first + _DAYS, window=window) for first in firsts]
    for loop in loops:
        loop.reset()
    found = alternate(
        {
            "ours": _stepped(few, actions[:, :_COPIES].contiguous()),
            "many": _stepped(many, actions),
            "loop": _looped(loops, actions[:, :_COPIES].numpy()),
        },
        turns,
    )
    found.of["each"] = [seconds * _COPIES / _MANY for seconds in found.of["many"]]  # as many steps as the others
    return found


def _group(count: int, symbols: int, window: int | None) -> Trading:
    made = group("train", None, range(count), 1, torch.device("cpu"), symbols, window=window, length=_DAYS)
    made.reset()
    return made


def _stepped(environments: Trading, actions: torch.Tensor) -> Callable[[], object]:
    @torch.inference_mode()
    def work() -> None:
        for each in actions:
            environments.step(each)

    return work


def _looped(environments: list[TradingLoop], actions: np.ndarray) -> Callable[[], object]:
    def work() -> None:
        for each in actions:
            seen, rewards = [], []
            for environment, action in zip(environments, each, strict=True):
                observation, reward, _, truncated, _ = environment.step(action)
                seen.append(environment.reset()[0] if truncated else observation)
                rewards.append(reward)
            np.stack(seen), np.array(rewards)

    return work


if __name__ == "__main__":
    program(measure, __doc__)
