"""A benchmark's process, forked from the running test, which has torch already."""

import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.support.fork import exit_code, write_output_to


def run_module(command: Sequence[str], cwd: Path, **_: Any) -> CompletedProcess[str]:
    """As `subprocess.run` of `python -m MODULE …`."""
    with tempfile.TemporaryFile("w+", 1) as out, tempfile.TemporaryFile("w+", 1) as err:  # os._exit keeps no lines

        def work() -> None:
            os.chdir(cwd)
            sys.argv = list(command[2:])
            write_output_to(out, err)
            warnings.simplefilter("ignore", RuntimeWarning)  # the test may have imported it
            runpy.run_module(command[2], run_name="__main__")

        code = exit_code(work)
        for file in (out, err):
            file.seek(0)
        return CompletedProcess(command, code, out.read(), err.read())
