from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.trading_loop import TradingLoop
from multigpu_cli.planning.batch import make_key
from multigpu_cli.trading.environment import Trading, TradingRules, figures
from multigpu_cli.trading.market import build
from multigpu_cli.trading.prices import draw_prices
from tests.support.world import CPU
from tests.trading.test_market import shuffle_after

PRICES = draw_prices(1, symbols=3, days=300)
MARKET = build(PRICES, window=5, period=10, turbulence_window=30, turbulence=0.8)
TRAIN = MARKET.days["train"]


def trading(numbers=range(4), market=MARKET, span=TRAIN, seed=7, recording=False, dtype=torch.float32, **rules):
    return Trading(market, TradingRules(**rules), span, numbers, seed, CPU, dtype=dtype, recording=recording)


def actions(steps, count, seed=0, symbols=3):
    """Random ones that lean towards buying, so that the cash runs out."""
    drawn = torch.rand(steps, count, symbols, generator=torch.Generator().manual_seed(seed))
    return drawn.mul(2).sub(0.7).clamp(-1, 1)


@pytest.mark.parametrize("fill", ["close", "open"])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_every_environment_is_the_same_as_a_plain_loop(window, fill):
    market = build(PRICES, window=5, period=10, turbulence_window=30, turbulence=0.8, fill=fill)
    rules: dict[str, Any] = {"cash": 60_000.0, "cost": 0.004, "window": window}  # little cash: purchases have to shrink
    group = trading(range(6), market, length=90, dtype=torch.float64, **rules)
    observation = group.reset()
    begins = [TRAIN[0] + make_key(7, number, 0) % (TRAIN[1] - TRAIN[0] - 90 + 1) for number in range(6)]
    loops = [TradingLoop(market, first, first + 90, dtype=np.float64, **rules) for first in begins]
    expected = np.stack([loop.reset()[0] for loop in loops])
    shrunk = stopped = 0
    for number, action in enumerate(actions(90, 6)):
        np.testing.assert_allclose(observation, expected, atol=1e-9)
        stepped = group.step(action)
        told = [loop.step(each) for loop, each in zip(loops, action.numpy(), strict=True)]
        expected = np.stack([observed for observed, *_ in told])
        np.testing.assert_allclose(stepped.reward, [reward for _, reward, *_ in told], atol=1e-9)
        assert stepped.truncated.tolist() == [truncated for *_, truncated, _ in told]
        assert not stepped.terminated.any()
        observation = stepped.last_observation
        if number < 89:  # then the next episodes begin
            state = group.state()
            np.testing.assert_allclose(state["cash"], [loop.cash for loop in loops], atol=1e-9, rtol=1e-9)
            np.testing.assert_allclose(state["held"], [loop.held for loop in loops], atol=1e-9)
        shrunk += sum(loop.shrunk for loop in loops)
        stopped += sum(market.stopped[loop.day - 1] for loop in loops)
    np.testing.assert_allclose(observation, expected, atol=1e-9)
    assert shrunk > 20
    assert stopped > 20


def test_money_and_holdings_never_fall_below_zero_and_no_money_appears():
    group = trading(range(8), cash=20_000.0, cost=0.01)
    group.reset()
    for action in actions(100, 8, seed=3):
        before = group.state()
        group.step(action)
        after = group.state()
        assert (after["cash"] >= 0).all()
        assert (after["held"] >= 0).all()
        assert torch.equal(after["held"], after["held"].round())
        day = (after["first"] + after["numbers"][:, 1] - 1).numpy()
        price = torch.from_numpy(MARKET.fill[day])
        change = after["held"] - before["held"]
        paid = (change * price).sum(1) + 0.01 * (change.abs() * price).sum(1)
        torch.testing.assert_close(after["cash"], before["cash"] - paid, atol=1e-6, rtol=0)


def test_on_days_of_unrest_everything_is_sold_and_nothing_bought():
    day = int(np.flatnonzero(MARKET.stopped[TRAIN[0] + 2 : TRAIN[1]])[0]) + TRAIN[0] + 2
    group = trading(range(2), span=(day - 2, TRAIN[1]), start="beginning")
    group.reset()
    for _ in range(2):
        group.step(torch.ones(2, 3))
    assert (group.state()["held"] > 0).all()
    group.step(torch.ones(2, 3))
    assert not group.state()["held"].any()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("day", [262, 280])
def test_no_observation_knows_the_future(window, day):
    """Played over the test dates, whose order changes after a day: all is as before up to that day, and not after."""
    told = []
    for prices in (PRICES, shuffle_after(PRICES, day)):
        market = build(prices, window=5, period=10, turbulence_window=30)
        group = trading(range(2), market, market.days["test"], start="beginning", window=window)
        seen = [group.reset()]
        seen += [group.step(action).last_observation for action in actions(len(PRICES) - 1 - market.days["test"][0], 2)]
        told.append(torch.stack(seen))
    known = day - market.days["test"][0] + 1
    assert torch.equal(told[0][:known], told[1][:known])
    assert not torch.equal(told[0][known], told[1][known])


def test_each_episode_of_each_environment_has_a_beginning_of_its_own_whoever_is_beside_it():
    together, alone = trading(range(4), length=20), trading([2], length=20)
    firsts = []
    for group, count in ((together, 4), (alone, 1)):
        group.reset()
        found = [group.state()["first"]]
        for _ in range(3):
            for _ in range(20):
                group.step(torch.zeros(count, 3))
            found.append(group.state()["first"])
        firsts.append(torch.stack(found))
    assert torch.equal(firsts[0][:, 2], firsts[1][:, 0])
    assert len(firsts[0].unique()) > 12
    assert firsts[0].min() >= TRAIN[0]
    assert firsts[0].max() + 20 <= TRAIN[1]


def test_an_episode_is_cut_off_and_the_next_one_begins_with_nothing_but_cash():
    group = trading(length=3, window=2)
    first = group.reset()
    assert first[:, :, -4:].tolist() == [[[1, 0, 0, 0]] * 2] * 4
    for _ in range(2):
        assert not group.step(torch.ones(4, 3)).truncated.any()
    end = group.step(torch.ones(4, 3))
    assert end.truncated.all()
    assert not end.terminated.any()
    assert end.observation[:, :, -4:].tolist() == [[[1, 0, 0, 0]] * 2] * 4
    assert (end.last_observation[:, -1, -3:] > 0).all()
    assert end.observation.dtype == end.reward.dtype == torch.float32
    assert set(group.figures()) == {"cumulative_return"}


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("at", [0, 7, 64, 71])  # at the beginning, within, and where new days are looked up
def test_it_goes_on_exactly_from_its_state(window, recording, at):
    rules: dict[str, Any] = {"window": window, "recording": recording, "length": 80}
    whole, resumed = trading(**rules), trading(**rules)
    whole.reset()
    for action in actions(at, 4):
        whole.step(action)
    state = whole.state()
    observation, anew = resumed.load_state({name: tensor.clone() for name, tensor in state.items()})
    assert anew == 0
    for action in actions(100, 4, seed=9):
        expected, found = whole.step(action), resumed.step(action)
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
    torch.testing.assert_close(whole.state(), resumed.state(), atol=0, rtol=0)
    torch.testing.assert_close(whole.figures(), resumed.figures(), atol=0, rtol=0)
    if at == 7:
        assert torch.equal(trading(**rules).load_state(state)[0], observation)


def test_where_prices_have_changed_the_episode_begins_anew():
    changed = build(draw_prices(2, symbols=3, days=300), period=10, turbulence=None)
    group, other = trading(length=20), trading(length=20, market=changed)
    group.reset()
    for action in actions(27, 4):
        group.step(action)
    observation, anew = other.load_state(group.state())
    assert anew == 4
    assert observation[:, -4:].tolist() == [[1, 0, 0, 0]] * 4
    assert other.state()["numbers"][0, :2].tolist() == [1, 0]


def test_what_was_observed_is_not_written_over():
    group = trading(window=5, length=70)
    seen, kept = [group.reset()], []
    for action in actions(150, 4):
        kept.append(seen[-1].clone())
        seen.append(group.step(action).observation)
    assert all(torch.equal(one, other) for one, other in zip(seen, kept, strict=False))


def test_it_steps_in_inference_mode_and_comes_out_of_it():
    group = trading(length=70)
    group.reset()
    with torch.inference_mode():
        for action in actions(150, 4):
            group.step(action)
    state = group.state()
    assert not any(tensor.is_inference() for tensor in state.values())
    observation, _ = group.load_state(state)
    assert not observation.is_inference()


def test_figures_are_those_of_the_days_values():
    span = MARKET.days["test"]
    group = trading(range(2), span=span, start="beginning", recording=True)
    group.reset()
    values, trades = [torch.full((2,), 1e6, dtype=torch.float64)], torch.zeros(2, dtype=torch.int64)
    held = torch.zeros(2, 3, dtype=torch.float64)
    days = span[1] - span[0]
    for number, action in enumerate(actions(days, 2, seed=5)):
        stepped = group.step(action)
        values.append(values[-1] + stepped.reward.double() * 1e4)
        if number < days - 1:
            trades += (group.state()["held"] != held).sum(1)
            held = group.state()["held"]
    assert stepped.truncated.all()
    found = group.figures()
    for name, value in figures(torch.stack(values, 1)).items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-4)
    assert ((found["trades"] - trades) >= 0).all()
    assert ((found["trades"] - trades) <= 3).all()  # those of the last day
    assert found["buy_and_hold_sharpe_ratio"].shape == (2,)
    assert len(group.details()["equity_curve"]["dates"]) == days + 1
    np.testing.assert_allclose(group.details()["equity_curve"]["values"]["policy"], torch.stack(values, 1)[0], atol=1)
