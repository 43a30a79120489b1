"""The URL that --mirror names: which are known, and what it must not hold."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from multigpu_cli.config.rules import Rule
from multigpu_cli.errors import RequestError

DRIVERS = {"file": "fsspec", "s3": "s3fs", "gs": "gcsfs"}
"""The package that each kind of URL needs; fsspec comes with torch."""


def find_url_errors(url: str, flag: str = "--mirror") -> Iterator[RequestError]:
    """What is wrong with a mirror's URL, which this flag gives; the remote folder is not touched."""
    scheme, _, place = url.partition(":")
    host = place[2:].partition("/")[0] if place.startswith("//") else ""
    if scheme not in DRIVERS or not (host or scheme == "file") or not place.strip("/"):
        problem = f"{flag} {_hide_password(url)}: is not the URL of a folder"
        yield RequestError(problem, remedy="s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:/PATH")
    elif scheme == "file" and host:
        yield RequestError(f"{flag} {url}: names a machine, {host}", remedy=f"file:/{host}… for a folder of this one")
    elif "@" in host or "?" in url:
        yield RequestError(
            f"{flag} {_hide_password(url)}: holds credentials or options, which would be written into config.yaml",
            remedy="leave them to the environment, for instance AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL",
        )
    elif find_spec(driver := DRIVERS[scheme]) is None:
        yield RequestError(f"{flag} {url}: needs {driver}, which is not installed", remedy=f"pip install {driver}")


def make_absolute(url: str) -> str:
    """The same folder from wherever a process looks at it: file:name is below the present folder."""
    scheme, _, path = url.partition(":")
    return f"file:{Path.cwd() / path}" if scheme == "file" and not path.startswith("/") else url


def _hide_password(url: str) -> str:
    head, at, tail = url.partition("?")[0].rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else tail


RULES = (Rule("mirror", lambda config: find_url_errors(url) if (url := config.checkpoint.mirror) else iter(())),)
