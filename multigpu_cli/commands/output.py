"""What commands do with their results: print them as lines or as JSON, and write them to files that a flag names."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.journal import dump_json


def print_result(result: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result: as JSON (plain data, dataclasses of it, paths), or else the lines that show it."""
    print(dump_json(result, indent=2) if as_json else "\n".join(lines))


def format_size(count: int) -> str:
    """A number of bytes: '12.3 MB', '4.0 kB'."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


@contextmanager
def writing_to(flag: str, target: Path) -> Iterator[None]:
    """Report a write that fails inside as a wrong value of the flag.

    Raises:
        RequestError: the file or folder that the flag names can't be written.
    """
    try:
        yield
    except OSError as error:
        raise RequestError(f"{flag} {target}: {error.strerror or error}", remedy=f"another {flag}") from error
