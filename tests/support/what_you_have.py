"""The table of docs/start/what-you-have.md: its rows are typed, and do what they say.

Needs nothing but Python: tests/test_what_you_have.py types them here, tests/support/walkthrough.py in a fresh clone.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PAGE = Path("docs", "start", "what-you-have.md")
CODE = re.compile(r"`([^`]+)`")
NOT_THE_USERS = {".git", ".venv", "__pycache__"}


class Row(NamedTuple):
    """What somebody has, the commands, whether the last one is refused, and what it prints."""

    have: str
    commands: list[str]
    refused: bool
    prints: list[str]


def read_rows(page: str) -> list[Row]:
    """The rows of all tables of the page, in order."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and "what you type" not in line]
    return [_read_row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]


def _read_row(have: str, commands: str, happens: str) -> Row:
    return Row(have, CODE.findall(commands), happens.startswith("refused"), CODE.findall(happens))


def type_row(row: Row, type_in: Callable[[str], tuple[int, str]], folder: Path) -> str:
    """Type a row's commands.

    Args:
        type_in: runs a command; returns its exit code and all that it printed.
        folder: where the commands run.

    Returns:
        '' if they did what the row says, else what was wrong, with the output of the last one typed.
    """
    for at, command in enumerate(row.commands, start=1):
        refused = row.refused and at == len(row.commands)
        before = list_files(folder) if refused else {}
        code, output = type_in(command)
        said = " ".join(output.split())
        wrong = [f"exit code {code}"] if code != (2 if refused else 0) else []
        wrong += ["a traceback"] if "Traceback" in said else []
        if at == len(row.commands):
            wrong += [f"did not print {words!r}" for words in row.prints if words not in said]
        if refused:
            wrong += ["several messages"] if len(re.findall(r"^\S", output, re.MULTILINE)) != 1 else []
            wrong += [f"touched {path}" for path, _ in sorted(before.items() ^ list_files(folder).items())]
        if wrong:
            return f"{command}\n{output}\n{', '.join(wrong)}"
    return ""


def list_files(folder: Path) -> dict[Path, tuple[int, int] | None]:
    """Size and time of each file below a folder, None for each folder; without what Python, pip and git keep there."""
    found: dict[Path, tuple[int, int] | None] = {}
    for path in folder.iterdir():
        if path.name in NOT_THE_USERS:
            continue
        if path.is_dir():
            found |= {path: None, **list_files(path)}
        else:
            found[path] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found
