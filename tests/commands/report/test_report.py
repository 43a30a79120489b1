"""The report as files, and as people see it."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest

import main_multi_gpu
from multigpu_cli.commands.report import report
from multigpu_cli.commands.report.report import make_report_dir, write_report
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.plot_style import color_of_run
from tests.commands.runs import PLAN, SUMMARY, event, interrupted_run, lines, run_folder
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


@pytest.fixture
def one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first is drawn, since each takes a fifth of a second."""
    draw = report.draw_plots
    monkeypatch.setattr(report, "draw_plots", lambda runs: islice(draw(runs), 1))


@pytest.mark.usefixtures("one_picture")
def test_any_number_of_runs_and_the_curves_of_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten runs of a sweep: all stand in a table with what they differ in, and eight have curves."""
    for number in range(10):
        run = interrupted_run(tmp_path / f"runs/r{number}", lr=0.1 + number / 100)
        (run / "summary.json").write_text(json.dumps(SUMMARY | {"final": {"val_loss": abs(number - 6) / 10}}))
    assert main_multi_gpu.run(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"by val_loss, lowest first: {tmp_path}/runs/r6\n" in said
    assert "a table of 10 runs, and the curves of the first 8" in said
    page = (tmp_path / "out/report.html").read_text()
    assert "<title>10 runs</title>" in page
    overview = page.partition("All runs, by val_loss, lowest first</h2>")[2].partition("</table>")[0]
    assert re.findall("<th>(r[0-9])</th>", overview) == ["r6", "r5", "r7", "r4", "r8", "r3", "r9", "r2", "r1", "r0"]
    assert "<th>lr</th>" in overview
    assert "<td>0.16</td>" in overview
    assert "<th>seed</th>" not in overview
    curves = re.search('alt="(Loss .*?)"', page)
    assert curves
    assert curves[1].endswith("r6, r5, r7, r4, r8, r3, r9, r2")


@pytest.mark.usefixtures("one_picture")
def test_the_order_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [interrupted_run(tmp_path / name) for name in "ab"]
    (runs[1] / "summary.json").write_text(json.dumps(SUMMARY | {"final": {"test_accuracy": 0.99}}))
    command = ["report", *map(str, runs), "--out", str(tmp_path / "out"), "--json"]
    assert main_multi_gpu.run([*command, "--sort-by", "test_accuracy"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["order"]) == ([str(runs[1]), str(runs[0])], "by test_accuracy, highest first")
    assert main_multi_gpu.run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["order"]) == ([str(runs[0]), str(runs[1])], "")
    assert main_multi_gpu.run(["report", str(runs[0]), "--sort-by", "accuracy"]) == 2
    assert "did you mean 'test_accuracy'?" in capsys.readouterr().err
    assert not (runs[0] / "report").exists()


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


def test_report_writes_nowhere_else_if_a_metric_is_called_like_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of metrics come from the journal, which may be a stranger's."""
    names = ["a/../../../mine", "b\0c", "../../mine", "x" * 200, "a b", "a.b"]
    evals = [event(9, "eval", split="val", step=8, epoch=2, samples=9, loss=1.0, **dict.fromkeys(names, 0.5))]
    evals += [event(10, "eval", split="val", step=9, epoch=3, samples=9, loss=1.0, **dict.fromkeys(names, 0.6))]
    run = run_folder(tmp_path / "runs" / "run", [event(1, "start", plan=PLAN), *lines(1, 8, 1), *evals])
    (run / "report" / "val_a").mkdir(parents=True)
    (tmp_path / "mine.png").write_text("mine")
    before = {path for path in tmp_path.rglob("*") if run / "report" not in path.parents}
    assert main_multi_gpu.run(["report", str(run)]) == 0
    assert {path for path in tmp_path.rglob("*") if run / "report" not in path.parents} == before
    assert (tmp_path / "mine.png").read_text() == "mine"
    pictures = [path.name for path in (run / "report").glob("val_*.png")]
    assert len(pictures) == 1 + len(names), "accuracy, and one picture for each"
    assert all(re.fullmatch(r"[\w@+-]+\.png", name) for name in pictures)
