"""`make walkthrough`: the README's bash blocks, typed one after the other in a fresh clone with a fresh environment.

What is committed is cloned. One shell runs all blocks, as a reader's does, and stops at the first that fails. Left out
are blocks that need GPUs or data, and `make test`. Needs nothing but Python: the environment is the README's own.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WALKED = "run by tests/support/walkthrough.py"


class Block(NamedTuple):
    """A fenced block of a document: its first line's number, language and text, and why it isn't run, or ''."""

    line: int
    language: str
    text: str
    not_run: str


def blocks(markdown: str) -> Iterator[Block]:
    """The fenced blocks of a document, in order."""
    fence = re.compile(r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence) *$", re.MULTILINE | re.DOTALL)
    for found in fence.finditer(markdown):
        before = markdown[: found.start()].rstrip().rsplit("\n", 1)[-1]
        exempt = re.fullmatch(r"<!-- not run: (.*) -->", before.strip())
        line = markdown.count("\n", 0, found.start()) + 1
        yield Block(line, found["language"].strip(), found["text"], exempt[1] if exempt else "")


def list_walked_blocks(markdown: str) -> list[Block]:
    """Those that a reader without GPUs types."""
    return [block for block in blocks(markdown) if block.language == "bash" and block.not_run in ("", WALKED)]


def script(chosen: list[Block]) -> str:
    """All blocks as one, each announced; the first command that fails ends it."""
    lines = ["set -euo pipefail"]
    for block in chosen:
        shown = f"README.md:{block.line}\n{block.text}".replace("\n", "\n  ").rstrip()
        lines += [f"printf '\\n[%4d s] %s\\n' $SECONDS {shlex.quote(shown)}", block.text]
    return "\n".join([*lines, f"printf '\\n[%4d s] all {len(chosen)} blocks ran\\n' $SECONDS"])


def main() -> int:
    """Exit code 0 if every block ran."""
    with tempfile.TemporaryDirectory(prefix="multigpu-walkthrough-") as folder:
        clone = Path(folder, "project")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS")}
        began = time.monotonic()
        text = script(list_walked_blocks((clone / "README.md").read_text()))
        code = subprocess.run(["bash", "-c", text], cwd=clone, env=environment, stdin=subprocess.DEVNULL).returncode
        reports = [path.relative_to(clone) for path in clone.glob("**/report.html")]
        names = ", ".join(str(path) for path in reports) or "none"
        print(f"exit code {code} after {time.monotonic() - began:.0f} s; reports: {names}")
        return code or not reports


if __name__ == "__main__":
    sys.exit(main())
