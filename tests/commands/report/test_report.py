"""The report as files, and as people see it."""

import json
import re
from pathlib import Path

import pytest

import main_multi_gpu
from multigpu_cli.commands.report.report import make_report_dir, write_report
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.plot_style import color_of_run
from tests.commands.runs import interrupted_run, run_folder
from tests.support.browser import pixels, screenshot


def test_one_page_that_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = interrupted_run(tmp_path / "<a> & b")
    assert main_multi_gpu.run(["report", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    page = Path(found["page"]).read_text()
    assert Path(found["page"]) == folder / "report/report.html"
    assert sorted(Path(name).name for name in found["pictures"]) == sorted(
        file.name for file in folder.glob("report/*.png")
    )
    assert re.findall(r"(?:src|href)=\"(?!data:)|url\(|@import|<script|<link", page) == []
    assert page.count("<img") == len(found["pictures"])
    assert "&lt;a&gt; &amp; b" in page
    assert "<a>" not in page
    assert "&lt;dog&gt;" in page
    assert "97.50 %" in page
    assert "ab" * 32 in page


def test_where_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = Path("runs/a"), Path("runs/b")
    assert make_report_dir([one], None) == Path("runs/a/report")
    assert make_report_dir([one, other], None) == Path("report")
    assert make_report_dir([one], "else/where") == Path("else/where")
    assert Path("else/where").is_dir()
    Path("file").touch()
    with pytest.raises(RequestError, match="--out file"):
        make_report_dir([one], "file")
    with pytest.raises(RequestError, match="at most 8 runs, not 9"):
        make_report_dir([one] * 9, None)


def test_a_run_without_a_line_has_a_page(tmp_path: Path) -> None:
    written = write_report([str(run_folder(tmp_path / "a", []))], None)
    assert "no line of training yet" in written.page.read_text()
    assert written.pictures == []


@pytest.mark.browser
def test_the_page_shows_curves(tmp_path: Path) -> None:
    """In the colours of the runs, at 800 pixels and on a phone; a page without data has next to none of them."""
    folders = [str(interrupted_run(tmp_path / name, scale=scale)) for name, scale in (("a", 1.0), ("b", 1.5))]
    empty = write_report([str(run_folder(tmp_path / "none", []))], None).page
    both = write_report(folders, str(tmp_path / "out")).page.as_uri()
    shown = [screenshot(both, tmp_path / f"{width}.png", width=width) for width in (800, 500)]
    alone = screenshot(write_report(folders[:1], None).page.as_uri(), tmp_path / "alone.png")
    nothing = screenshot(empty.as_uri(), tmp_path / "nothing.png")
    assert pixels(nothing, color_of_run(0)) + pixels(nothing, color_of_run(1)) < 50
    assert pixels(alone, color_of_run(0)) > 3000
    for image in shown:
        assert min(pixels(image, color_of_run(0)), pixels(image, color_of_run(1))) > 1500
