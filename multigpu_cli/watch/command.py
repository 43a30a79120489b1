"""`watch`: its options; what it does is imported late."""

import os
from collections.abc import Iterator
from typing import Annotated

import typer

from multigpu_cli.commands.options import print_result, run_argument
from multigpu_cli.commands.requests import parse_option
from multigpu_cli.config.types import integer


def watch(
    paths: Annotated[list[str] | None, run_argument("PATH", "run folders, studies, or folders that hold some")] = None,
    port: Annotated[str | None, typer.Option(metavar="N", help="port on this machine (default: a free one)")] = None,
    export: Annotated[str | None, typer.Option(metavar="FILE", help="write the page to a file; serve nothing")] = None,
) -> None:
    """Follow runs on a live page in the browser. Without PATH: those under checkpoints/.

    The address that it prints has a token, without which nothing is served.
    """
    number = parse_option(integer(0, 65535), "--port", port)
    from multigpu_cli.watch.runs import WatchedRuns
    from multigpu_cli.watch.server import PageServer, export_page

    runs = WatchedRuns(paths or [])
    if export is not None:
        print_result(None, [str(export_page(runs, export))], as_json=False)
        return
    with PageServer(runs, number or 0) as server:
        print_result(None, describe_address(server.server_address[1], server.token), as_json=False)
        server.serve_forever()


def describe_address(port: int, token: str) -> Iterator[str]:
    """The address with its token, and how to reach it from another machine."""
    yield f"http://127.0.0.1:{port}/?token={token}"
    yield f"  from another machine first: ssh -N -L {port}:127.0.0.1:{port} {os.uname().nodename}"
    yield "  Ctrl-C ends it; the runs go on"
