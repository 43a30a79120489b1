"""One page about one run, or about several to compare them: what the journals hold, as pictures and tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from multigpu_cli.commands.report.data import load_runs
from multigpu_cli.commands.report.html import render_page
from multigpu_cli.commands.report.plots import draw_plots
from multigpu_cli.commands.status import find_runs
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.journal import dump_json

_MOST = 8  # colours that can be told apart


class ReportFiles(NamedTuple):
    """The files of a report."""

    page: Path
    pictures: list[Path]


def write_report(names: Sequence[str], out: str | None) -> ReportFiles:
    """Write the report of these runs.

    Args:
        out: the folder; None puts it into the run folder, beside the journal, or for several runs into ./report.

    Raises:
        RequestError: no run there, too many for one page, or a folder that can't be written.
    """
    runs = find_runs(names)
    folder = make_report_dir(runs, out)
    loaded = load_runs(runs)
    plots = list(draw_plots(loaded))
    try:
        files = [folder / f"{picture.name}.png" for picture in plots]
        for file, picture in zip(files, plots, strict=True):
            file.write_bytes(picture.png)
        (folder / "report.html").write_text(render_page(loaded, plots), encoding="utf-8")
    except OSError as error:
        raise _not_writable(folder, error) from error
    return ReportFiles(folder / "report.html", files)


def make_report_dir(runs: Sequence[Path], out: str | None) -> Path:
    """The folder of a report, made.

    Raises:
        RequestError: too many runs for one page, or a folder that can't be made.
    """
    if len(runs) > _MOST:
        raise RequestError(f"{len(runs)} runs on one page, at most {_MOST}", remedy="name those to compare")
    folder = Path(out) if out is not None else runs[0] / "report" if len(runs) == 1 else Path("report")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error) from error
    return folder


def _not_writable(folder: Path, error: OSError) -> RequestError:
    return RequestError(f"--out {folder}: {error.strerror or error}", remedy="another --out")


def print_report(written: ReportFiles, *, as_json: bool) -> None:
    """Print where the report is."""
    if as_json:
        print(dump_json(written._asdict(), indent=2))
        return
    print(f"{written.page}\n  with {len(written.pictures)} pictures, also as PNG files beside it")
