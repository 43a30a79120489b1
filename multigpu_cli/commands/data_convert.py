"""data convert: other formats as Arrow files, once, so that `--data arrow` reads them where they lie."""

from pathlib import Path
from typing import Any

from multigpu_cli.config.types import parse_path
from multigpu_cli.data.convert_to_arrow import convert_to_arrow
from multigpu_cli.errors import RequestError, pluralize


def convert_data(source: str, to: str) -> dict[str, Any]:
    """Convert a file or folder; returns what was written, for JSON.

    Raises:
        RequestError: a path that is none, or what `convert_to_arrow` refuses.
    """
    paths = []
    for label, value in (("SOURCE", source), ("--to", to)):
        try:
            paths.append(parse_path(value))
        except ValueError as error:
            raise RequestError(f"{label} {error}") from error
    written = convert_to_arrow(*paths)
    return {"to": str(Path(to)), **written._asdict()}


def format_conversion(found: dict[str, Any]) -> list[str]:
    """What was written, as lines."""
    files = pluralize(found["files"], "file")
    return [
        f"{found['to']}: {pluralize(found['rows'], 'row')}, {found['bytes']:,} bytes in {files}",
        *(f"  {name}: {kind}" for name, kind in found["columns"].items()),
        f"train on it: multigpu --data arrow --data-dir {found['to']} --set data.target=COLUMN",
    ]
