"""The server of the page, for this machine and whoever has the token; and the page as a file."""

import gzip
import hmac
import re
import secrets
import sys
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.commands.options import writing_to
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.watch.runs import WatchedRuns
from multigpu_cli.watch.view import MOST_RUNS, UNREADABLE, check_checkpoint, list_runs, show_runs, show_study

_HOST = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?")
_PATIENCE = 0.4  # seconds for which a request reads old lines of a long journal


class PageServer(ThreadingHTTPServer):
    """Answers requests from this machine that have the token; it only reads.

    RequestError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, runs: WatchedRuns, port: int) -> None:
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _Request)
        except OSError as error:
            raise RequestError(f"--port {port}: {error.strerror or error}", remedy="another --port, or none") from error

    def handle_error(self, *where: Any) -> None:
        """A browser that hangs up is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*where)

    def answer(self, path: str, query: dict[str, list[str]]) -> dict[str, Any] | None:
        """The data at a path, None where there is nothing; RequestError: of a wrong query."""
        names = query.get("run", [])
        if path == "/check":  # it may read for minutes, so without the lock
            return check_checkpoint(self.runs, names, query.get("checkpoint", [""])[0])
        calls: dict[str, Callable[[], dict[str, Any]]] = {
            "/runs": lambda: list_runs(self.runs, _PATIENCE),
            "/view": lambda: show_runs(self.runs, names, query.get("known", [""])[0], _PATIENCE),
            "/study": lambda: show_study(self.runs, query.get("id", [""])[0]),
        }
        with self.runs.lock:
            return calls[path]() if path in calls else None


class _Request(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version, protocol_version = "multigpu", "", "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        token = query.get("token", [""])[0]
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):  # another site whose name leads here
            self._send(HTTPStatus.FORBIDDEN, "the Host of the request is not this machine\n")
        elif not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "the token is missing or wrong: use the address that `watch` printed\n")
        elif address.path == "/":
            self._send(HTTPStatus.OK, build_page({}), "text/html; charset=utf-8")
        else:
            self._send_data(address.path, query)

    def _send_data(self, path: str, query: dict[str, list[str]]) -> None:
        try:
            found, status = self.server.answer(path, query), HTTPStatus.OK
        except UNREADABLE as error:
            problem = error.problem if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
            found, status = {"error": problem}, HTTPStatus.BAD_REQUEST
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, "there is nothing here\n")
        else:
            self._send(status, dump_json(found), "application/json")

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(status)
        if len(body) > 2000 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        headers |= {
            "Content-Security-Policy": f"{build_policy()}; frame-ancestors 'none'",
            "Referrer-Policy": "no-referrer",
        }
        headers |= {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """The terminal keeps the address in sight, and no token is repeated."""


@cache
def _read_part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@cache
def build_policy() -> str:
    """The Content-Security-Policy: nothing but the page's own script and style, and data from where it came from."""
    script, style = (b64encode(sha256(_read_part(name).encode()).digest()).decode() for name in ("page.js", "page.css"))
    allowed = f"script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src data:; connect-src 'self'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def build_page(content: dict[str, Any]) -> str:
    """The page; with `content`, the answers by address, it shows these and asks no server."""
    data = dump_json(content).replace("<", "\\u003c")  # no text ends the element
    parts = {"POLICY": build_policy(), "STYLE": _read_part("page.css"), "SCRIPT": _read_part("page.js"), "DATA": data}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read_part("page.html"))


def export_page(runs: WatchedRuns, file: str) -> Path:
    """Write the page with all that it shows now."""
    content: dict[str, Any] = {"runs": list_runs(runs, float("inf"))}
    ids = [row["id"] for row in content["runs"]["runs"] if row["phase"] != "unreadable"]
    for shown in [[each] for each in ids] + [ids] * (1 < len(ids) <= MOST_RUNS):
        content["view?" + "&".join(f"run={each}" for each in shown)] = show_runs(runs, shown, "", float("inf"))
    for key in runs.list_studies():
        content[f"study?id={key}"] = show_study(runs, key)
    with writing_to("--export", Path(file)):
        publish(Path(file), build_page(content).encode())
    return Path(file)
