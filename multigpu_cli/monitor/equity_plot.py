"""The plot of an equity curve: the value of portfolios day by day, and how far it is below its maximum."""

from collections.abc import Mapping, Sequence
from datetime import date
from itertools import accumulate

from matplotlib import rc_context
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from multigpu_cli.monitor.plot_style import INK, STYLE, color_of_run, save_png

_DASHES = ("-", "--", "-.")


def draw_equity(dates: Sequence[str], values: Mapping[str, Sequence[float]], prices: str) -> bytes:
    """A PNG file.

    Args:
        dates: T of them, as 2017-09-01.
        values: T values of each portfolio by its name, the policy's first.
        prices: where they come from, for the line below.
    """
    days = [date.fromisoformat(day).toordinal() - date(1970, 1, 1).toordinal() for day in dates]
    with rc_context(STYLE):
        figure = Figure(figsize=(8.8, 5.6), layout="constrained")
        gains, falls = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for at, (name, worth) in reversed(list(enumerate(values.items()))):  # the policy's lies on top
            gained = [value / worth[0] - 1 for value in worth]
            fallen = [value / height - 1 for value, height in zip(worth, accumulate(worth, max), strict=True)]
            label = f"{name.replace('_', ' ')}: {gained[-1]:+.1%}, largest fall {abs(min(fallen)):.1%}"
            gains.plot(days, gained, _DASHES[at % len(_DASHES)], color=color_of_run(at), label=label)
            falls.plot(days, fallen, _DASHES[at % len(_DASHES)], color=color_of_run(at))
        gains.set_title(f"Gain on the test dates, {dates[0]} to {dates[-1]}")
        gains.set_ylabel("gain since the first day")
        gains.legend(*(found[::-1] for found in gains.get_legend_handles_labels()), loc="best", frameon=True)
        falls.set_title("Below the highest value so far")
        falls.set_ylabel("fall")
        falls.set_xlabel("date")
        for axes in (gains, falls):
            axes.axhline(0, color=INK, linewidth=0.8, zorder=1)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
            axes.margins(x=0.01)
        locator = AutoDateLocator(minticks=4, maxticks=9)
        falls.xaxis.set_major_locator(locator)
        falls.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        caption = f"{prices}. One stretch of dates, with costs, without slippage or market impact."
        figure.supxlabel(caption, fontsize=8, color=INK, wrap=True)
        return save_png(figure)
