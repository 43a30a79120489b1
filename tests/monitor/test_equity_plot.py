import io
import math

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from multigpu_cli.monitor.plot_style import color_of_run, draw_equity


def curves(days):
    return {
        "policy": [1e6 * (1 + 0.002 * day) for day in range(days)],
        "buy_and_hold": [1e6 * (1.1 + 0.1 * math.sin(day / 9)) for day in range(days)],
        "equal_weight": [1e6 * (1 - 0.001 * day) for day in range(days)],
    }


@pytest.mark.parametrize("days", [2, 180])
def test_each_portfolio_has_a_line_of_its_own(days):
    dates = [f"20{11 + day // 336}-{1 + day // 28 % 12:02}-{1 + day % 28:02}" for day in range(days)]
    image = imread(
        io.BytesIO(draw_equity(dates, curves(days), "5 symbols, made up, " + "and much to say of them, " * 6))
    )
    for number in range(3):
        pixels = (np.abs(image[..., :3] - to_rgb(color_of_run(number))).max(-1) < 0.02).sum()
        assert pixels > 1000, number
    edges = np.concatenate([image[:3].ravel(), image[-3:].ravel(), image[:, :3].ravel(), image[:, -3:].ravel()])
    assert edges.min() == 1, "nothing is cut off"
