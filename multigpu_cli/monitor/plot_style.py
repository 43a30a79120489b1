"""The style of all plots: colours, type and lines, as matplotlib takes them."""

import io
from typing import Any

from matplotlib.figure import Figure

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
    shown = name.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def color_of_run(number: int) -> str:
    """The colour of a run, the same in all plots."""
    return _COLOURS[number % len(_COLOURS)]


def save_png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()
