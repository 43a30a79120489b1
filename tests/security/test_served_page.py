"""The server of `watch` before hostile requests and hostile runs: it keeps answering, and tells nothing."""

import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from multigpu_cli.watch.server import PageServer
from tests.commands.runs import interrupted_run
from tests.watch.pages import ask, list_by_name, request, serving

pytestmark = pytest.mark.slow
SECRET = "SECRET-of-elsewhere"
CHECKPOINT = "checkpoints/step_00000012"
RAW = {
    "two hosts": (b"GET /runs?{} HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.com\r\nConnection: close\r\n\r\n", {403}),
    "address of elsewhere": (b"GET http://evil.com/runs?{} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", {403, 404}),
    "huge line": (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n", {414}),
    "500 headers": (b"GET / HTTP/1.1\r\n" + b"X-a: y\r\n" * 500 + b"\r\n", {431}),
    "TLS": (b"\x00\xff\x16\x03\x01\r\n\r\n", set()),
}


def send(server: PageServer, content: bytes) -> bytes:
    """The first bytes of an answer; none if the server closes the connection, whose rest it need not read."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as connection:
        try:
            connection.sendall(content)
            return connection.recv(100)
        except ConnectionError:
            return b""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    folder = tmp_path_factory.mktemp("watched")
    interrupted_run(folder / "a")
    with serving(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def no_traceback(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "CONNECT", "FOO"])
def test_page_answers_no_other_method_than_get(method: str, server: PageServer) -> None:
    answer = request(server, f"/runs?token={server.token}", method=method, Host="localhost")
    assert answer.status in (400, 405, 501)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:80.evil.com", "0.0.0.0", "169.254.169.254", "127.0.0.1:99999999", "[::1]x", "localhost.evil.com"],
)
def test_page_answers_no_other_host(host: str, server: PageServer) -> None:
    assert request(server, f"/runs?token={server.token}", Host=host).status == 403


@pytest.mark.parametrize("query", ["", "?token=x&token={}", "?token={}%00", "?token=%F0%9F%98%80", "?token="])
def test_page_answers_no_other_token(query: str, server: PageServer) -> None:
    assert request(server, f"/runs{query.format(server.token)}", Host="localhost").status == 403


@pytest.mark.parametrize("name", RAW)
def test_page_refuses_requests_that_no_browser_sends(name: str, server: PageServer) -> None:
    content, statuses = RAW[name]
    answer = send(server, content.replace(b"{}", f"token={server.token}".encode()))
    if answer.startswith(b"HTTP/"):  # without a version that it knows the server answers with its page alone
        assert int(answer.split()[1]) in statuses
    assert ask(server, "/runs")["runs"]


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/a/config.yaml",
        "/view.py",
        "//etc/passwd",
        "/x/../runs",
        "/%72uns",
    ],
)
def test_page_has_no_other_paths(path: str, server: PageServer) -> None:
    assert request(server, f"{path}?token={server.token}", Host="localhost").status == 404


@pytest.mark.parametrize(
    "query",
    [
        *("view?run=", "view?run=../a", "view?" + "run=a&" * 6, "view?run=" + "a" * 60_000, "view?run={}&known=%00"),
        *("check?", "study?id=x", "check?run={}&checkpoint=../../../../etc", "check?run={}&checkpoint=a/../b"),
    ],
    ids=lambda query: query[:30],
)
def test_page_answers_any_query_with_a_status(query: str, server: PageServer) -> None:
    number = list_by_name(server)["a"]["id"]
    answer = request(server, f"/{query.format(number)}&token={server.token}", Host="localhost")
    assert answer.status in (200, 400, 404, 414)
    assert b"Traceback" not in answer.body


def test_page_lets_no_other_site_read_it(server: PageServer) -> None:
    origin = {"Origin": "http://evil.com", "Sec-Fetch-Site": "cross-site"}
    headers = request(server, f"/runs?token={server.token}", Host="localhost", **origin).headers
    assert "Access-Control-Allow-Origin" not in headers
    for name in ("Content-Security-Policy", "Referrer-Policy", "Cross-Origin-Resource-Policy"):
        assert headers[name]
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")


def test_page_answers_next_to_slow_connections(server: PageServer) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.server_address[1])))
            connection.sendall(b"GET /runs HTTP/1.1\r\nHost: 1")
        number = list_by_name(server)["a"]["id"]
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: ask(server, f"/view?run={number}"), range(40)))
    assert all("error" not in answer for answer in answers)


@pytest.mark.parametrize("removed", ["a", "."])
def test_page_answers_after_its_runs_were_removed(removed: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    interrupted_run(folder / "a")
    with serving(folder) as server:
        number = list_by_name(server)["a"]["id"]
        shutil.rmtree(folder / removed)
        for path in (f"/view?run={number}", "/runs", f"/check?run={number}&checkpoint=step_00000012"):
            answer = request(server, f"{path}&token={server.token}".replace("/runs&", "/runs?"), Host="localhost")
            assert answer.status in (200, 400)


@pytest.mark.filterwarnings("ignore:.* is damaged, and not used")
@pytest.mark.parametrize(
    "name", [".", "summary.json", "journal.jsonl", "config.yaml", f"{CHECKPOINT}/manifest.json", CHECKPOINT]
)
def test_page_shows_nothing_behind_a_link(name: str, tmp_path: Path) -> None:
    for folder in (tmp_path / "runs/a", tmp_path / "elsewhere"):
        interrupted_run(folder)
        (folder / CHECKPOINT).mkdir(parents=True)
        (folder / CHECKPOINT / "manifest.json").write_text("{}")
    for file in (file for file in (tmp_path / "elsewhere").rglob("*") if file.is_file()):
        file.write_text(file.read_text().replace("mlp on digits", SECRET).replace("completed", SECRET) + SECRET)
    shutil.rmtree(tmp_path / "runs/a" / name) if name in (".", CHECKPOINT) else (tmp_path / "runs/a" / name).unlink()
    (tmp_path / "runs/a" / name).symlink_to(tmp_path / "elsewhere" / name)
    with serving(tmp_path / "runs") as server:
        shown = [ask(server, "/runs")]
        for row in shown[0]["runs"]:
            shown += [
                ask(server, f"/view?run={row['id']}"),
                ask(server, f"/check?run={row['id']}&checkpoint={CHECKPOINT[12:]}"),
            ]
    assert SECRET not in str(shown)


@pytest.mark.filterwarnings("ignore:.* damaged, and not used")
@pytest.mark.parametrize(
    "name",
    [
        "summary.json",
        "config.yaml",
        ".lock",
        "logs/state.json",
        "journal.jsonl",
        "plan.json",
        f"{CHECKPOINT}/manifest.json",
    ],
)
def test_fifo_in_a_run_keeps_no_page_waiting(name: str, tmp_path: Path) -> None:
    interrupted_run(tmp_path / "sound")
    fifo = interrupted_run(tmp_path / "odd") / name
    fifo.parent.mkdir(parents=True, exist_ok=True)
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    with serving(tmp_path) as server:
        rows = list_by_name(server)
        assert "sound" in rows
        for row in rows.values():
            for path in (f"/view?run={row['id']}", f"/check?run={row['id']}&checkpoint={CHECKPOINT[12:]}"):
                assert request(server, f"{path}&token={server.token}", Host="localhost").status in (200, 400)
