"""The plot of a benchmark over the number of workers: step time, speedup, efficiency, utilisation, shares of time."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from multigpu_cli.monitor.plot_style import STYLE, color_of_run, escape_text, save_png

_SHADES = {
    "compute": "#9fc3da",
    "compute and wire": "#5f93ad",
    "data": "#e0a458",
    "wire": "#d1495b",
    "stragglers": "#7b4fa3",
}


def draw_benchmark(rungs: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """A PNG file of four charts; nn.DataParallel, where it was measured, is a line of its own in the first two."""
    of_dp = [rung for rung in rungs if rung["strategy"] == "dp"]
    rungs = [rung for rung in rungs if rung["strategy"] != "dp"]
    workers = [rung["workers"] for rung in rungs]
    names = [str(count) for count in workers]
    with rc_context(STYLE):
        figure = Figure(figsize=(8.8, 6.0), layout="constrained")
        (time, speed), (use, parts) = figure.subplots(2, 2)
        for at, rung in enumerate(rungs):
            time.plot([at] * len(rung["step_ms"]), rung["step_ms"], "o", color=color_of_run(0), alpha=0.4, markersize=5)
        time.plot(names, [median(rung["step_ms"]) for rung in rungs], "-", color=color_of_run(0), label="measured")
        forecast = [rung["forecast_ms"] for rung in rungs]
        time.plot(names, forecast, "--s", color=color_of_run(1), label="forecast", markersize=4)
        time.set_title("Time of an optimizer step")
        time.set_ylabel("milliseconds")
        speed.plot(names, [rung["speedup"] for rung in rungs], "-o", color=color_of_run(0), label="measured")
        speed.plot(names, workers, ":", color="#9aa5ae", label="ideal")
        speed.set_title("Speedup")
        speed.set_ylabel("over one worker")
        if of_dp:
            places = [str(rung["workers"]) for rung in of_dp]
            look: dict[str, Any] = {"color": color_of_run(2), "label": "DataParallel", "markersize": 4}
            time.plot(places, [median(rung["step_ms"]) for rung in of_dp], "-^", **look)
            speed.plot(places, [rung["speedup"] for rung in of_dp], "-^", **look)
        efficiency = [100 * rung["efficiency"] for rung in rungs]
        use.bar(names, efficiency, color=color_of_run(0), width=0.5, label="efficiency")
        known = [(str(rung["workers"]), rung["utilisation"]) for rung in rungs if rung["utilisation"] is not None]
        if known:
            use.plot(*zip(*known, strict=True), "-D", color=color_of_run(1), label="utilisation of the devices")
        use.set_title("Efficiency and utilisation")
        use.set_ylabel("per cent")
        below = [0.0] * len(rungs)
        for part, shade in _SHADES.items():
            if not any(part in rung["shares"] for rung in rungs):
                continue
            heights = [100 * rung["shares"].get(part, 0.0) for rung in rungs]
            parts.bar(names, heights, bottom=below, color=shade, label=part, width=0.5)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        parts.set_title("Where the time goes")
        parts.set_ylabel("per cent")
        parts.legend(loc="lower left", ncols=2, frameon=True)
        for axes in (time, speed, use, parts):
            axes.set_xlabel("workers")
            axes.set_ylim(bottom=0)
            axes.grid(visible=False, axis="x")
        time.legend(loc="lower left")
        speed.legend(loc="lower right")
        use.set_ylim(top=1.25 * use.get_ylim()[1])
        use.legend(loc="upper left", ncols=2)
        figure.suptitle(escape_text(title), fontweight="bold")
        return save_png(figure)
