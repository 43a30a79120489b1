"""The README's picture: of a screen as terminals show it, and of today's words."""

import html
import re
from pathlib import Path

from benchmarks.picture import drawn, screen
from multigpu_cli.monitor.format import format_eval_line

ROOT = Path(__file__).resolve().parents[2]


def words(svg: str) -> str:
    """The text of a picture, line by line."""
    lines: dict[float, str] = {}
    for height, text in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([^<]*)</text>', svg):
        lines[float(height)] = lines.get(float(height), "") + html.unescape(text).replace("\xa0", " ")
    return "\n".join(line.rstrip() for _, line in sorted(lines.items()) if line.strip())


def test_what_is_written_over_is_gone_and_the_bar_stays() -> None:
    seen = "\x1b[1mPlan\x1b[0m\r\n|   | step 1/4\r           \repoch 1\r\n|   | step 1/4\r|#  | step 2/4, loss 1"
    text = screen(seen)
    assert text == "\x1b[1mPlan\x1b[0m\nepoch 1\n|#  | step 2/4, loss 1"
    assert words(drawn(text)).splitlines()[-3:] == ["Plan", "epoch 1", "|#  | step 2/4, loss 1"]


def test_the_picture_in_the_readme_has_todays_words() -> None:
    """make picture draws it anew."""
    said = words((ROOT / "docs/run.svg").read_text())
    for label in ("what", "where", "batch", "learning rate", "length", "warm-up", "precision", "starts", "saves to"):
        assert re.search(rf"^ {label}", said, re.MULTILINE), label
    fields = {"epoch": 2, "split": "val", "loss": 0.3, "accuracy": 0.9, "samples": 180}
    shape = re.escape(format_eval_line(fields)).replace("0\\.3000", r"[\d.]+").replace("90\\.00", r"[\d.]+")
    assert re.search(shape, said)
    assert re.search(r"^\|█+[▉-▏]? *\| step \d+/\d+, [\d:]+ left, loss [\d.]+, [\d,]+ samples/s$", said, re.MULTILINE)
