import numpy as np

from multigpu_cli.trading.prices import draw_prices


def test_the_seed_decides_and_the_plan_is_told_that_no_market_is_meant():
    one, same, other = draw_prices(1), draw_prices(1), draw_prices(2)
    assert np.array_equal(one.close, same.close)
    assert not np.array_equal(one.close, other.close)
    assert one.close.shape == (1500, 5)
    assert "synthetic" in one.remark


def test_the_days_are_possible_ones():
    found = draw_prices(3, symbols=4, days=700)
    assert (found.low <= np.minimum(found.open, found.close)).all()
    assert (found.high >= np.maximum(found.open, found.close)).all()
    assert (found.low > 0).all()
    assert list(found.dates) == sorted(set(found.dates))
    assert all(day.weekday() < 5 for day in found.dates)


def test_returns_have_the_deviation_and_correlation_that_they_should():
    returns = np.diff(np.log(draw_prices(4, symbols=3, days=20_000).close), axis=0)
    np.testing.assert_allclose(returns.std(0) * np.sqrt(252), (0.12**2 + 0.20**2) ** 0.5, rtol=0.03)
    np.testing.assert_allclose(np.corrcoef(returns.T)[0, 1], 0.12**2 / (0.12**2 + 0.20**2), atol=0.03)
    following = np.corrcoef(returns[:-1, 0], returns[1:, 0])[0, 1]
    assert abs(following) < 0.03  # nothing in the past tells of the future
