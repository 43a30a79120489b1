"""A picture of a real run, for the README: what a terminal of 80 columns shows when most of the run is done.

    python -m benchmarks.picture docs/run.svg

Trains the digits in two processes on a pseudo-terminal, takes what stands on it at three quarters of the steps, and
lets rich draw it.
"""

import io
import os
import re
import sys
import tempfile
from pathlib import Path

import pexpect
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

_ROOT = Path(__file__).resolve().parent.parent
_COLUMNS, _LINES, _SHARE = 80, 60, 0.75
_COMMAND = "python main_multi_gpu.py --multi-gpu ddp"


def taken() -> str:
    """What a terminal got to see up to that point; the run is then ended."""
    with tempfile.TemporaryDirectory() as folder:
        child = pexpect.spawn(
            sys.executable,
            [str(_ROOT / "main_multi_gpu.py"), *_COMMAND.split()[2:]],
            cwd=folder,
            env=os.environ | {"TERM": "xterm-256color", "CUDA_VISIBLE_DEVICES": ""},
            dimensions=(_LINES, _COLUMNS),
            encoding="utf-8",
            timeout=600,
        )
        seen, done = "", 0.0
        while done < _SHARE:
            child.expect(r"step (\d+)/(\d+), [^\r]*loss[^\r]*(?=\r)")
            seen += child.before + child.after
            done = int(child.match[1]) / int(child.match[2])
        child.sendintr()
        child.expect(pexpect.EOF)
        child.close()
    return seen


def screen(seen: str) -> str:
    """The lines as they stand there in the end: what was written over is gone, colours stay."""
    lines = seen.replace("\r\n", "\n").split("\n")
    return "\n".join(re.sub(r"\x1b\[[A-K]", "", line.rstrip("\r").rpartition("\r")[2]) for line in lines)


def drawn(text: str) -> str:
    """The same as SVG."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {_COMMAND}", style="bold"))
    console.print(Text.from_ansi(text))
    return console.export_svg(title="multigpu", theme=SVG_EXPORT_THEME, unique_id="run")


def main() -> None:
    picture = Path(sys.argv[1])
    picture.parent.mkdir(exist_ok=True)
    picture.write_text(drawn(screen(taken())))
    print(f"{picture}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
