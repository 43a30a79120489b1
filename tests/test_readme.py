"""Every bash block of the README runs as it stands, in a copy of the project, with the test's own Python.

A comment `<!-- not run: REASON -->` directly before a block exempts it. The reason says 'needs GPUs', 'needs DATA' or
'run by NAME', the file that runs it instead.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.forked import run_forked
from tests.distributed.launcher import alone
from tests.support.walkthrough import ROOT, Block, blocks, list_walked_blocks, script

README = ROOT / "README.md"
SECONDS = 900  # a block that hangs is ended; a busy machine takes minutes
NO_COMMANDS = {"text", "yaml", "python", "json", "toml", "mermaid", "make", "diff"}


def is_reason(reason: str) -> bool:
    """Whether an exemption is one that we accept; a file that runs the block instead has to exist."""
    runner = re.search(r"\brun by (\S+)", reason)
    if runner:
        return (ROOT / runner[1].rstrip(".,;")).is_file()
    return "needs GPUs" in reason or "needs DATA" in reason


def of_the_readme() -> list[Block]:
    return list(blocks(README.read_text())) if README.exists() else []


def runnable() -> list[Block]:
    return [block for block in of_the_readme() if block.language == "bash" and not block.not_run]


def copy_project(folder: Path) -> Path:
    """A copy of the project to run in, without earlier runs, and with its bytecode, which takes seconds to make."""
    unwanted = shutil.ignore_patterns(
        ".git", ".venv*", "checkpoints", "runs", "studies", "build", "*.egg-info", "*-pytest-*", ".*_cache"
    )
    return Path(shutil.copytree(ROOT, folder / "project", ignore=unwanted))


def run(script: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a script; its whole process group is ended when the time is up."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(ROOT / "tests" / "support" / "site")}
    command = ["bash", "-euo", "pipefail", "-c", script]
    with subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\n(ended after {SECONDS} seconds)"
    return process.returncode, output


def test_the_readme_has_commands() -> None:
    assert len(runnable()) >= 2


def test_every_exemption_has_a_reason() -> None:
    assert [block for block in of_the_readme() if block.not_run and not is_reason(block.not_run)] == []


def test_commands_stand_in_bash_blocks() -> None:
    assert [block for block in of_the_readme() if block.language not in NO_COMMANDS | {"bash"}] == []


def run_mostly_forked(script: str, folder: Path) -> tuple[int, str]:
    """As `run`, without variables; from the second call of the front door on in forks, which have torch already."""
    calls = re.split(r"^python main_multi_gpu.py((?:.*\\\n)*.*)\n", script, flags=re.MULTILINE)
    code, output = run(f"{calls[0]}python main_multi_gpu.py{calls[1]}", folder)
    for before, words in zip(calls[2::2], [*calls[3::2], ""], strict=True):
        if not code:
            code, said = run(before, folder)
            output += said
        if words and not code:
            workers = 2 if "--nproc-per-node 2" in words else 0
            command = alone(*shlex.split(words.replace("\\\n", "")))
            ended = run_forked(command, folder, forked_workers=workers)
            code, output = ended.returncode, output + ended.stdout + ended.stderr
    return code, output


@pytest.mark.parametrize("run_all", [run_mostly_forked, pytest.param(run, marks=pytest.mark.slow)])
def test_the_blocks_run_one_after_the_other(run_all: Callable[[str, Path], tuple[int, str]], tmp_path: Path) -> None:
    """As a reader types them."""
    code, output = run_all(script(runnable()), copy_project(tmp_path))
    assert code == 0, output[-6000:]
    assert re.search(r"^same: [0-9a-f]{64}$", output, re.MULTILINE)
    assert (tmp_path / "project/runs/mine/report/report.html").is_file()


EXAMPLE = """\
Text
```bash
one
two
```
<!-- not run: needs GPUs -->
```bash
three
```
```text
four
```
"""


def test_blocks_are_found_with_their_reasons() -> None:
    assert list(blocks(EXAMPLE)) == [
        Block(2, "bash", "one\ntwo\n", ""),
        Block(7, "bash", "three\n", "needs GPUs"),
        Block(10, "text", "four\n", ""),
    ]


def test_the_walkthrough_takes_all_that_a_reader_can_type(tmp_path: Path) -> None:
    text = README.read_text()
    chosen = list_walked_blocks(text)
    assert chosen[0].text.startswith("make quickstart")
    assert {block.line for block in runnable()} < {block.line for block in chosen}
    assert "make test" not in script(chosen)
    said = [Block(1, "bash", "name=fresh\n", ""), Block(4, "bash", "echo $name\n", "")]
    code, output = run(script(said), tmp_path)
    assert (code, output.splitlines()[-1].split("] ")[1]) == (0, "all 2 blocks ran")
    assert "README.md:4\n  echo $name\nfresh\n" in output
    assert run(script([Block(1, "bash", "false\n", ""), *said]), tmp_path)[1].count("README.md") == 1


def test_reasons_are_judged() -> None:
    good = ["needs GPUs", "needs DATA (see there)", "run by .ci/run", "run by tests/test_readme.py."]
    assert [reason for reason in [*good, "too slow", "run by nobody", ""] if is_reason(reason)] == good


def test_a_failing_line_fails_its_block(tmp_path: Path) -> None:
    assert run("false\ntrue", tmp_path)[0] != 0
    assert run("echo $UNSET_NAME", tmp_path)[0] != 0
    assert run("command -v python", tmp_path) == (0, f"{Path(sys.executable).parent}/python\n")
