"""The README's picture: of a screen as terminals show it, and of today's words."""

import html
import re
from pathlib import Path

from benchmarks.picture import drawn, screen
from multigpu_cli.monitor.format import format_epoch

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
    rows = (
        "what",
        "where",
        "batch",
        "learning rate",
        "optimizer",
        "length",
        "warm-up",
        "precision",
        "starts",
        "saves to",
    )
    for label in rows:
        assert re.search(rf"^ {label}", said, re.MULTILINE), label
    labels = [
        label for label, _ in format_epoch(1, 20, {"train_loss": 1.0, "val_loss": 1.0, "val_accuracy": 1.0}, 1, 1)
    ]
    assert re.search(" +".join(labels), said)
    assert re.search(r"^ +1/20 +[\d.]+ +[\d.]+ +[\d.]+ % +[\d,]+ +[\d.]+  best$", said, re.MULTILINE)
    bar = r"^epoch \d+/20 \|█+[▉-▏]? *\| step \d+/\d+, [\d:]+ left, loss [\d.]+, [\d,]+ samples/s$"
    assert re.search(bar, said, re.MULTILINE)
