"""report: one page about one run, or a comparison of any number; the journals' numbers as plots and tables."""

import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from multigpu_cli.commands.options import writing_to
from multigpu_cli.commands.report import data
from multigpu_cli.commands.report.plots import Picture, draw_plots
from multigpu_cli.commands.status import choose_key, collect_figures, explain_order, find_runs, order_runs
from multigpu_cli.config.paths import refuse_links
from multigpu_cli.monitor.curves import RunData, load_runs
from multigpu_cli.monitor.plot_style import color_of_run

_MOST_CURVES = 8  # colours that can be distinguished


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report, the runs as the page lists them, and by what they are sorted, in words."""

    page: Path
    pictures: list[Path]
    runs: list[Path]
    order: str


def write_report(names: Sequence[str], out: str | None, sort_by: str | None = None) -> ReportFiles:
    """Write the report of these runs, of more than eight a table and the best eight, to RUN/report or ./report."""
    runs = find_runs(names)
    loaded, order = _sort_runs(load_runs(runs), sort_by)
    folder = make_report_dir(runs, out)
    shown = loaded[:_MOST_CURVES]
    overview = data.tabulate_overview(loaded, order) if len(loaded) > len(shown) else None
    plots = list(draw_plots(shown))
    page, files = folder / "report.html", [folder / f"{picture.name}.png" for picture in plots]
    with writing_to("--out", folder):
        for file, picture in zip(files, plots, strict=True):
            file.write_bytes(picture.png)
        page.write_text(render_page(shown, plots, overview), encoding="utf-8")
    return ReportFiles(page, files, [run.folder for run in loaded], order)


def render_page(runs: Sequence[RunData], pictures: Sequence[Picture], overview: data.ReportTable | None = None) -> str:
    """The page, page.html filled in: plots inside, no scripts, readable on a phone and on paper."""
    folder = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=folder, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    per_run = {"Samples": data.tabulate_samples, "Classes": data.tabulate_classes}
    return page.get_template("page.html").render(
        title=f"{len(overview.rows)} runs" if overview else ", ".join(run.name for run in runs),
        contents=" · ".join(dict.fromkeys(str(run.history.plan.get("contents", "")) for run in runs)),
        date=time.strftime("%Y-%m-%d %H:%M"),
        runs=runs,
        pictures=[{"says": each.says, "base64": b64encode(each.svg).decode()} for each in pictures],
        overview=overview,
        several="h3" if len(runs) > 1 else "",
        per_run=[(name, [table for table in map(call, runs) if table.rows]) for name, call in per_run.items()],
        tables=data,
        color_of_run=color_of_run,
    )


def _sort_runs(runs: list[RunData], sort_by: str | None) -> tuple[list[RunData], str]:
    """The best first, and by what, in words; as they are where nobody asks and all have room."""
    figures = [collect_figures(run.summary, run.history) for run in runs]
    key = choose_key(figures) if sort_by is None and len(runs) > _MOST_CURVES else sort_by
    if key is None:
        return runs, ""
    return [runs[number] for number in order_runs(figures, key)], explain_order(key)


def make_report_dir(runs: Sequence[Path], out: str | None) -> Path:
    """Make the folder of a report."""
    if out is None and len(runs) == 1:
        refuse_links(runs[0])
    folder = Path(out) if out is not None else runs[0] / "report" if len(runs) == 1 else Path("report")
    with writing_to("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def format_report(written: ReportFiles) -> Iterator[str]:
    """Where the report is."""
    yield str(written.page)
    yield f"  with {len(written.pictures)} pictures, also as PNG files beside it"
    if written.order:
        yield f"  {written.order}: {written.runs[0]}"
    if len(written.runs) > _MOST_CURVES:
        yield f"  a table of {len(written.runs)} runs, and the curves of the first {_MOST_CURVES}"
