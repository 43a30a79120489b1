"""SECURITY.md: the tests that it names are there, and what it says of the network is so."""

import ast
import inspect
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import main_multi_gpu
from multigpu_cli.distributed.world import World
from tests.support.ranks import run_on_each_rank
from tests.test_house_rules import find_imports, product, whole_tree

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "SECURITY.md").read_text()
TALKS = {"aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "urllib", "urllib3", "webbrowser", "xmlrpc"}

ANSWERS = {
    "multigpu_cli/watch/server.py": {
        *("http.HTTPStatus", "http.server.BaseHTTPRequestHandler", "http.server.ThreadingHTTPServer"),
        *("urllib.parse.parse_qs", "urllib.parse.urlsplit"),
    }
}
"""What a server on 127.0.0.1 needs, which asks nobody."""


def named_tests() -> Iterator[tuple[str, str]]:
    """(file, function); a function without a file is of the file named last."""
    file = ""
    for path, name in re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", TEXT):
        file = path or file
        yield file, name


def test_every_claim_names_a_test_that_is_there() -> None:
    assert len(list(named_tests())) >= 10
    for file, name in named_tests():
        functions = [node.name for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "name")]
        assert name in functions, f"{file}::{name}"


def test_the_flag_that_lets_code_run_is_where_it_is_said_to_be() -> None:
    group = typer.main.get_group(main_multi_gpu.app)
    have = {name for name, each in group.commands.items() if any("--own-code" in option.opts for option in each.params)}
    text = " ".join(TEXT.split())
    using, looking = (
        re.search(r"Training, ([^.]*) have that flag", text),
        re.search(r"([^.]*) import none at all", text),
    )
    assert using
    assert looking
    assert {"evaluate", "export"} <= set(re.findall(r"`(\w+)`", using[1])) <= have
    assert not set(re.findall(r"`(\w+)`", looking[1])) & have
    assert any("--own-code" in option.opts for option in group.params), "training"


def test_nothing_here_speaks_http() -> None:
    found = [
        f"{path}: {name}"
        for path, module in product(whole_tree())
        for node in ast.walk(module)
        for name in find_imports(node, path)
        if name.partition(".")[0] in TALKS and name not in ANSWERS.get(path, {"urllib.parse.quote"})  # names of files
    ]
    assert found == []


def listening() -> dict[int, str]:
    """The TCP ports on which this process listens, each with its address as the kernel writes it."""
    targets = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    mine = {target[len("socket:[") : -1] for target in targets if target.startswith("socket:")}
    tables = [Path("/proc/self/net", name).read_text() for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table.splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in mine]
    return {int(port, 16): address for address, port in places}


def test_torchs_store_listens_on_every_interface() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert set(listening()[store.port]) == {"0"}, "else SECURITY.md is out of date"


def test_gloo_listens_on_the_chosen_interface_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def addresses(world: World) -> list[str]:
        dist.all_reduce(torch.ones(1))
        return sorted(set(listening().values()))

    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert run_on_each_rank(2, addresses) == [[loopback], [loopback]]


def test_torchs_rendezvous_unpickles_what_the_store_holds() -> None:
    source = inspect.getsource(dynamic_rendezvous)
    assert "pickle.loads(" in source, "else SECURITY.md is out of date"
