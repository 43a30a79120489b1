"""The server of the page, for this machine and whoever has the token; and the page as a file."""

import gzip
import hmac
import re
import secrets
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.commands.options import writing_to
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.watch.runs import WatchedRuns
from multigpu_cli.watch.view import MOST_RUNS, answer_or_explain, check_checkpoint, list_runs, show_runs, show_study

_HOST = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?")
_PATIENCE = 0.4  # seconds for which a request reads old lines of a long journal


class PageServer(ThreadingHTTPServer):
    """Answers requests from this machine that have the token; it only reads. RequestError: the port is taken."""

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


class _Request(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version, protocol_version = "multigpu", "", "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        token = parse_qs(self.path.partition("?")[2]).get("token", [""])[0]
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):  # another site whose name leads here
            self._send(HTTPStatus.FORBIDDEN, "the Host of the request is not this machine\n")
        elif not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "the token is missing or wrong: use the address that `watch` printed\n")
        elif self.path.startswith("/?"):
            self._send(HTTPStatus.OK, build_page({}), "text/html; charset=utf-8")
        elif (found := answer(self.server.runs, self.path[1:], _PATIENCE)) is None:
            self._send(HTTPStatus.NOT_FOUND, "there is nothing here\n")
        else:
            status = HTTPStatus.BAD_REQUEST if "error" in found else HTTPStatus.OK
            self._send(status, dump_json(found), "application/json")

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(status)
        if len(body) > 2000 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Referrer-Policy": "no-referrer"}
        headers |= {"Content-Security-Policy": f"{build_policy()}; frame-ancestors 'none'", "Cache-Control": "no-store"}
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


def answer(runs: WatchedRuns, address: str, patience: float) -> dict[str, Any] | None:
    """The data at an address, which has "error" where they can't be shown; None where there is nothing."""
    path, _, rest = address.partition("?")
    query = parse_qs(rest)
    names, first = query.get("run", []), {name: values[0] for name, values in query.items()}
    calls: dict[str, Callable[[WatchedRuns], dict[str, Any]]] = {
        "runs": partial(list_runs, patience=patience),
        "view": partial(show_runs, names=names, known=first.get("known", ""), patience=patience),
        "study": partial(show_study, key=first.get("id", "")),
        "check": partial(check_checkpoint, ids=names, checkpoint=first.get("checkpoint", "")),
    }
    with nullcontext() if path == "check" else runs.lock:  # it may read for minutes
        return answer_or_explain(lambda: calls[path](runs.look())) if path in calls else None


def export_page(runs: WatchedRuns, file: str) -> Path:
    """Write the page with all that it shows now."""
    listed = list_runs(runs, inf)
    views = ["run=" + row["id"] for row in listed["runs"] if row["phase"] != "unreadable"]
    views += ["&".join(views)] * (1 < len(views) <= MOST_RUNS)
    addresses = [*(f"view?{each}" for each in views), *(f"study?id={key}" for key in runs.studies)]
    content: dict[str, Any] = {each: answer(runs, each, inf) for each in addresses}
    content |= {"saved": time.strftime("%Y-%m-%d %H:%M"), "runs": listed}
    with writing_to("--export", Path(file)):
        publish(Path(file), build_page(content).encode())
    return Path(file)
