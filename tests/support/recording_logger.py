"""A logger of a user's own that appends what it gets to rows.jsonl in the working directory, and can be made to fail.

While there is a file `refuse`, it raises; while there is a file `hang`, it hangs.
"""

import json
import os
import time
from pathlib import Path
from typing import Any


class Recorder:
    def open(self, run_id: str, config: dict[str, Any]) -> None:
        self._write({"open": run_id, "seed": config["seed"], "parent": os.getsid(0) == os.getpid()})

    def log(self, step: int, numbers: dict[str, float]) -> None:
        while Path("hang").exists():
            time.sleep(0.05)
        if Path("refuse").exists():
            raise OSError("no answer from https://me:geheim7@host/api")
        self._write({"step": step, **numbers})

    def close(self) -> None:
        self._write({"close": True})

    def _write(self, content: dict[str, Any]) -> None:
        with open("rows.jsonl", "a") as file:
            file.write(json.dumps(content) + "\n")


class WithoutLog:
    def open(self, run_id: str, config: dict[str, Any]) -> None:
        raise AssertionError("it is not called")


def read_rows(kind: str = "step") -> list[dict[str, Any]]:
    """What a recorder has written: rows, or lines with open or close."""
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in row]
