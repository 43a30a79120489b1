"""A copy of the tree in which one mutant at a time lives, with a server that runs tests there."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mutants.mutations import Mutation
from tests.mutants.tracing import SITE

_BEFORE_TORCH = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:5"}  # as tests/conftest.py has them


class Copy:
    """Closing it ends what runs there and removes it. The tree that it was made from is never written to.

    Attributes:
        tree: its root.
    """

    def __init__(self, root: Path, home: Path) -> None:
        self.tree, self._home = home / "tree", home
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in listed.stdout.split("\0"):
            if name and (root / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.tree / name)
        (self.tree / "sitecustomize.py").write_text(SITE, encoding="utf-8")
        (home / "tmp").mkdir()
        environment = os.environ | _BEFORE_TORCH | {"PYTHONPATH": str(self.tree), "TMPDIR": str(home / "tmp")}
        self._changes = 0
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.server"],
            cwd=self.tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> "Copy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """The file has the fault meanwhile, and a time of its own: bytecode of another mutant never passes for it."""
        file, kept = self.tree / mutation.file, self.tree / f"{mutation.file}.kept"
        file.rename(kept)
        try:
            file.write_text(mutation.made(kept.read_text(encoding="utf-8")), encoding="utf-8")
            self._changes += 1
            os.utime(file, (self._changes, self._changes))
            yield
        finally:
            kept.replace(file)

    def run(self, limits: Mapping[str, float], *, first: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
        """Run tests; what the server tells.

        Args:
            limits: the seconds that each of them may take.
            first: those of them that come first.
            words: more flags for pytest.
        """
        files = list(dict.fromkeys(test.partition("::")[0] for test in limits))
        return self._ask({"files": files, "limits": dict(limits), "first": list(first), "words": list(words)})

    def gather(self, file: str) -> dict[str, Any]:
        """Run a test file; also tells which lines each test ran."""
        lines = self._home / "lines"
        lines.unlink(missing_ok=True)
        told = self._ask({"files": [file], "limits": {}, "first": [], "words": [], "traced": str(lines)})
        return told | {"lines": lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []}

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin
        assert self._server.stdout
        places = {"log": self._home / "log", "told": self._home / "told", "scratch": self._home / "t"}
        asked = what | {name: str(path) for name, path in places.items()}
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of {self._home} is gone")
        shutil.rmtree(self._home / "tmp", ignore_errors=True)
        (self._home / "tmp").mkdir(exist_ok=True)
        found: dict[str, Any] = json.loads(answer)
        return found

    def log(self) -> str:
        """What pytest said last."""
        return (self._home / "log").read_text(encoding="utf-8", errors="replace")
