"""A server of a page for tests, and requests to it."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from email.message import Message
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from multigpu_cli.watch.runs import WatchedRuns
from multigpu_cli.watch.server import PageServer


@contextmanager
def serving(*folders: Path) -> Iterator[PageServer]:
    with PageServer(WatchedRuns([str(each) for each in folders]), 0) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Answer(NamedTuple):
    status: int
    headers: Message
    body: bytes


def request(server: PageServer, path: str, *, method: str = "GET", **headers: str) -> Answer:
    """A request as it is: without a token of its own, and with a Host only if one is given."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        with connection.getresponse() as response:
            return Answer(response.status, response.headers, response.read())


def ask(server: PageServer, path: str) -> Any:
    """The data at a path, with the token."""
    mark = "&" if "?" in path else "?"
    return json.loads(request(server, f"{path}{mark}token={server.token}", Host="localhost").body)


def list_by_name(server: PageServer) -> dict[str, dict[str, Any]]:
    while True:  # on a busy machine a request reads only some of them
        rows = ask(server, "/runs")["runs"]
        if all(row["phase"] != "unread" for row in rows):
            return {row["name"]: row for row in rows}


def view(server: PageServer, *names: str, known: str = "") -> Any:
    rows = list_by_name(server)
    return ask(server, "/view?" + "&".join(f"run={rows[name]['id']}" for name in names) + f"&known={known}")
