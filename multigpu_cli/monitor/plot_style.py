"""The style of all plots (colours, type and lines, as matplotlib takes them), and the plot of a portfolio's value."""

import io
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import accumulate
from typing import Any

from matplotlib import rc_context
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from multigpu_cli.errors import make_printable

_COLOURS = ("#0067a5", "#d1495b", "#2a9d6f", "#b5651d", "#7b4fa3", "#008b9a", "#c2185b", "#5d6d7e")
INK, _FAINT = "#22303c", "#dfe4e8"
STYLE: Any = {  # matplotlib's own type lists every name
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa5ae",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "report",  # the same picture is the same text
}


def escape_text(name: str) -> str:
    """A name that matplotlib shows as it is: $ would begin a formula, and a leading _ hides a name from the legend."""
    shown = make_printable(name).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def color_of_run(number: int) -> str:
    """The colour of a run, the same in all plots."""
    return _COLOURS[number % len(_COLOURS)]


def save_png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()


_DASHES = ("-", "--", "-.")


def draw_equity(dates: Sequence[str], values: Mapping[str, Sequence[float]], prices: str) -> bytes:
    """A PNG file of T values of each portfolio, the policy's first, on T dates; `prices` says where these come from."""
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
        gains.set(title=f"Gain on the test dates, {dates[0]} to {dates[-1]}", ylabel="gain since the first day")
        gains.legend(*(found[::-1] for found in gains.get_legend_handles_labels()), loc="best", frameon=True)
        falls.set(title="Below the highest value so far", xlabel="date", ylabel="fall")
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
