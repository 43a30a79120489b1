"""Calls of make gpu-check in a process of their own, for tests."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.gpu.machine import ROOT


def call_check(environ: Mapping[str, str], *words: str) -> list[dict[str, Any]]:
    """The lines of a call, the last with its exit code."""
    command = [sys.executable, "-m", "tests.gpu.check", *words]
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    found[-1]["code"] = done.returncode
    return found
