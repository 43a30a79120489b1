"""What `make test-all` says of the lines that ran: whichever process ran them, and nothing is left elsewhere."""

import os
import subprocess
import sys
from pathlib import Path, PurePath

from tests.coverage_by_room import ROOT, Lines, table

PROGRAM = """
import os, subprocess, sys
from multigpu_cli import errors
elsewhere = sys.argv[1]
exec(compile("page = 1", errors.__file__.replace("errors.py", "commands/report/page.html"), "exec"))  # as Jinja does
os.chdir(elsewhere)
if os.fork() == 0:
    from multigpu_cli.planning import batch
    os._exit(0)
os.wait()
subprocess.run([sys.executable, "-c", "from multigpu_cli.config import schema"], check=True)
"""


def test_rooms_are_added_up_and_the_least_covered_comes_first() -> None:
    files = [
        Lines(PurePath("multigpu_cli/data/source.py"), 10, 10),
        Lines(PurePath("multigpu_cli/run/deep/inside.py"), 30, 15),
        Lines(PurePath("multigpu_cli/data/builtin/npz.py"), 20, 14),
        Lines(PurePath("multigpu_cli/engine.py"), 40, 40),
        Lines(PurePath("multigpu_cli/__init__.py"), 0, 0),
    ]
    assert [row.split() for row in table(files).splitlines()] == [
        ["lines", "run", "share"],
        ["30", "15", "50.0%", "multigpu_cli/run/"],
        ["30", "24", "80.0%", "multigpu_cli/data/"],
        ["40", "40", "100.0%", "multigpu_cli/engine.py"],
        ["100", "79", "79.0%", "all"],
    ]


def test_forked_and_started_processes_count_wherever_they_work(tmp_path: Path) -> None:
    elsewhere, measurements = tmp_path / "elsewhere", tmp_path / "measured"
    elsewhere.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"COVERAGE_FILE": str(measurements / "part"), "PYTHONPATH": str(ROOT)}
    environment.pop("COVERAGE_PROCESS_CONFIG", None)  # of the tests themselves, if they are measured

    def python(*words: str) -> str:
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    python("coverage", "run", str(tmp_path / "program.py"), str(elsewhere))
    written = list(measurements.iterdir())  # they are combined into one
    shares = {row.split()[-1]: row.split()[:-1] for row in python("tests.coverage_by_room").splitlines()}
    ran = {name: int(numbers[1]) for name, numbers in shares.items() if name != "share"}
    assert ran["multigpu_cli/planning/"] > 0, "loaded by the forked process alone"
    assert ran["multigpu_cli/config/"] > 0, "loaded by the started process alone"
    assert ran["multigpu_cli/checkpoint/"] == 0, "loaded by none, and listed"
    assert len(written) >= 3, "a file of each process"
    assert list(elsewhere.iterdir()) == []
