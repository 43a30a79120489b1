"""The identity of a run, as loggers get it: read from files that a stranger may have written."""

import os
from pathlib import Path

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.loggers.sender import identify_run
from tests.commands.runs import interrupted_run
from tests.config.test_regular_files import within_seconds

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return interrupted_run(tmp_path / "run")


def test_identity_holds_settings_without_private_ones(run: Path) -> None:
    (run / "config.yaml").write_text("notify: tell\n  SECRET\nlr: 4e-3\ndata: {name: digits, args: {}}\nrecipe: null\n")
    identity = identify_run(run)
    assert identity is not None
    assert identity.config == {"lr": 0.004, "data.name": "digits", "data.args": {}, "recipe": None}
    assert identity.project == "digits"
    assert identity.began > 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (BOMB, r"config\.yaml:2: anchors and aliases"),
        ("a: " + "[" * 9000, r"config\.yaml:1: nested more than 50 levels deep"),
        ("lr: !!python/name:os.system", r"config\.yaml:1: the tag"),
        ("- a list", r"config\.yaml: is not a mapping"),
        (b"\xff\xfe", r"config\.yaml: is not UTF-8 text"),
    ],
    ids=["aliases", "nesting", "tag", "list", "bytes"],
)
def test_config_yaml_that_is_not_plain_is_named(content: str | bytes, problem: str, run: Path) -> None:
    (run / "config.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with within_seconds(20), pytest.raises(RequestError, match=problem):
        identify_run(run)


def test_config_yaml_that_is_a_fifo_is_named(run: Path) -> None:
    (run / "config.yaml").unlink(missing_ok=True)
    os.mkfifo(run / "config.yaml")
    with within_seconds(20), pytest.raises(OSError, match=r"not a regular file.*config\.yaml"):
        identify_run(run)


@pytest.mark.filterwarnings("ignore:.* a line is damaged")
@pytest.mark.parametrize("line", ["[1]", "7", "{", '{"event": "start", "time": "x"}'])
def test_first_line_that_is_no_event_is_named(line: str, run: Path) -> None:
    journal = run / "journal.jsonl"
    journal.write_text(f"{line}\n{journal.read_text()}")
    with pytest.raises(RequestError, match=r"journal\.jsonl:1: is not an event"):
        identify_run(run)
