"""`make walkthrough`: the README's bash blocks, typed one after the other in a fresh clone with a fresh environment.

What is committed is cloned. One shell runs all blocks, as a reader's does, and stops at the first that fails. Left out
are blocks that need GPUs or data, and `make test`. Then come the rows of docs/start/what-you-have.md, as they stand,
also after one that fails. Needs nothing but Python: the environment is the README's own.
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

from tests.support.what_you_have import PAGE, read_rows, type_row

ROOT = Path(__file__).resolve().parents[2]
WALKED = "run by tests/support/walkthrough.py"
# PyPI's torchvision doesn't import beside a torch for CPUs: what it misses is defined there. Elsewhere it does nothing.
SITE = Path("tests", "support", "site")


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


def script(chosen: list[Block], page: str = "README.md") -> str:
    """All blocks as one, each announced; the first command that fails ends it."""
    lines = ["set -euo pipefail"]
    for block in chosen:
        shown = f"{page}:{block.line}\n{block.text}".replace("\n", "\n  ").rstrip()
        lines += [f"printf '\\n[%4d s] %s\\n' $SECONDS {shlex.quote(shown)}", block.text]
    return "\n".join([*lines, f"printf '\\n[%4d s] all {len(chosen)} blocks ran\\n' $SECONDS"])


def run_page(clone: Path, page: Path, environment: dict[str, str], before: str = "") -> int:
    """Exit code of the blocks of a page in one shell, which shows what they print."""
    text = before + script(list_walked_blocks((clone / page).read_text()), str(page))
    return subprocess.run(["bash", "-c", text], cwd=clone, env=environment, stdin=subprocess.DEVNULL).returncode


def type_table(clone: Path, environment: dict[str, str]) -> list[str]:
    """Type the rows of "what you have, what you type", each in a new shell; returns what failed."""
    activate = "source .venv/bin/activate\n"
    environment = environment | {"PYTHONPATH": str(clone / SITE)}
    print(f"\nfrom here on with PYTHONPATH={SITE}, for a torchvision of PyPI beside a torch for CPUs", flush=True)
    if run_page(clone, PAGE, environment, activate):
        return [str(PAGE)]

    def type_in(command: str) -> tuple[int, str]:
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", activate + command], cwd=clone, env=environment, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        print(f"$ {command}\n{done.stdout}[{time.monotonic() - began:4.0f} s] exit code {done.returncode}", flush=True)
        return done.returncode, done.stdout

    rows, failed = read_rows((clone / PAGE).read_text()), []
    for row in rows:
        print(f"\n{row.have}", flush=True)
        if wrong := type_row(row, type_in, clone):
            failed.append(f"{row.have}: {wrong.splitlines()[-1]}")
    print(f"\n{len(rows) - len(failed)} of {len(rows)} rows of {PAGE} do what they say")
    return failed


def main() -> int:
    """Exit code 0 if every block ran, and every row."""
    with tempfile.TemporaryDirectory(prefix="multigpu-walkthrough-") as folder:
        clone = Path(folder, "project")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS")}
        began = time.monotonic()
        code = run_page(clone, Path("README.md"), environment)
        reports = [path.relative_to(clone) for path in clone.glob("**/report.html")]
        names = ", ".join(str(path) for path in reports) or "none"
        print(f"exit code {code} after {time.monotonic() - began:.0f} s; reports: {names}")
        if code or not reports:
            return code or 1
        failed = type_table(clone, environment)
        print("\n".join([*failed, f"{time.monotonic() - began:.0f} s in all"]))
        return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
