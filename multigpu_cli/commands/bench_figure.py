"""The picture of a benchmark: step time, speedup, efficiency, and where the time goes, over the number of workers."""

import io
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from multigpu_cli.monitor.picture_style import STYLE, colour

_SHADES = {"compute": "#9fc3da", "data": "#e0a458", "wire": "#d1495b", "stragglers": "#7b4fa3"}


def drawn(rungs: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """A PNG file of four charts."""
    workers = [rung["workers"] for rung in rungs]
    names = [str(count) for count in workers]
    with rc_context(STYLE):
        figure = Figure(figsize=(8.8, 6.0), layout="constrained")
        (time, speed), (use, parts) = figure.subplots(2, 2)
        for at, rung in enumerate(rungs):
            time.plot([at] * len(rung["step_ms"]), rung["step_ms"], "o", color=colour(0), alpha=0.4, markersize=5)
        time.plot(names, [median(rung["step_ms"]) for rung in rungs], "-", color=colour(0), label="measured")
        time.plot(
            names, [rung["forecast_ms"] for rung in rungs], "--s", color=colour(1), label="forecast", markersize=4
        )
        time.set_title("Milliseconds per optimizer step")
        speed.plot(names, [rung["speedup"] for rung in rungs], "-o", color=colour(0), label="measured")
        speed.plot(names, workers, ":", color="#9aa5ae", label="ideal")
        speed.set_title("Speedup (samples per second)")
        use.bar(names, [100 * rung["efficiency"] for rung in rungs], color=colour(0), width=0.5)
        use.set_title("Efficiency (%)")
        below = [0.0] * len(rungs)
        for part, shade in _SHADES.items():
            heights = [100 * rung["shares"][part] for rung in rungs]
            parts.bar(names, heights, bottom=below, color=shade, label=part, width=0.5)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        parts.set_title("Where the time goes (%)")
        parts.legend(loc="lower left", ncols=2, frameon=True)
        for axes in (time, speed, use, parts):
            axes.set_xlabel("workers")
            axes.set_ylim(bottom=0)
            axes.grid(visible=False, axis="x")
        time.legend()
        speed.legend()
        figure.suptitle(title, fontweight="bold")
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=160)
    return picture.getvalue()
