"""report: one page about one run, or a comparison of several; the journals' numbers as plots and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from multigpu_cli.commands.output import writing_to
from multigpu_cli.commands.report.data import load_runs
from multigpu_cli.commands.report.html import render_page
from multigpu_cli.commands.report.plots import draw_plots
from multigpu_cli.commands.status import find_runs
from multigpu_cli.errors import RequestError

_MOST = 8  # colours that can be distinguished


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report."""

    page: Path
    pictures: list[Path]


def write_report(names: Sequence[str], out: str | None) -> ReportFiles:
    """Write the report of these runs.

    Args:
        out: the folder; None takes RUN/report, or for several runs ./report.

    Raises:
        RequestError: a folder has no run, there are too many runs, or the folder can't be written.
    """
    runs = find_runs(names)
    folder = make_report_dir(runs, out)
    loaded = load_runs(runs)
    plots = list(draw_plots(loaded))
    page, files = folder / "report.html", [folder / f"{picture.name}.png" for picture in plots]
    with writing_to("--out", folder):
        for file, picture in zip(files, plots, strict=True):
            file.write_bytes(picture.png)
        page.write_text(render_page(loaded, plots), encoding="utf-8")
    return ReportFiles(page, files)


def make_report_dir(runs: Sequence[Path], out: str | None) -> Path:
    """Make the folder of a report.

    Raises:
        RequestError: there are too many runs for one page, or the folder can't be made.
    """
    if len(runs) > _MOST:
        raise RequestError(f"a page takes at most {_MOST} runs, not {len(runs)}", remedy="name the runs to compare")
    folder = Path(out) if out is not None else runs[0] / "report" if len(runs) == 1 else Path("report")
    with writing_to("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def format_report(written: ReportFiles) -> Iterator[str]:
    """Where the report is."""
    yield str(written.page)
    yield f"  with {len(written.pictures)} pictures, also as PNG files beside it"
