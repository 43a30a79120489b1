"""The rules that hold for all tests."""

import io
import os
import sys
from pathlib import Path

import pytest

from tests.benchmarks.forked import run_module
from tests.support.fork import exit_code

FILES = {
    "test_whole.py": 'import pytest\npytest.importorskip("a_package_nobody_has")\n',
    "test_one.py": (
        "import pytest\n"
        "@pytest.mark.skipif(True, reason='root may write anywhere')\ndef test_listed(): pass\n"
        "@pytest.mark.skipif(True, reason='not today')\ndef test_unlisted(): pass\n"
        "def test_inside(): pytest.skip('not now')\n"
        "@pytest.mark.xfail(strict=True)\ndef test_expected(): assert 0\n"
    ),
}


@pytest.mark.parametrize(("ci", "outcome"), [("", "4 skipped, 1 xfailed"), ("true", "1 skipped, 1 xfailed, 2 errors")])
def test_with_ci_a_skip_that_is_on_no_list_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: str
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    words = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    monkeypatch.setenv("CI", ci)
    done = run_module([sys.executable, "-m", "pytest", *words, f"--rootdir={Path.cwd()}", str(tmp_path)], Path.cwd())
    assert outcome in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert ("tests/conftest.py: Skipped: not today" in done.stdout) == bool(ci)


def test_a_fork_ends_where_its_error_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on as a second run of the tests, and report to whoever the first one reports to."""
    tests, closed = os.getpid(), io.StringIO()
    closed.close()

    def work() -> None:
        monkeypatch.setattr("sys.stderr", closed)
        raise OSError("no file may grow")

    try:
        assert exit_code(work) == 1
    finally:
        if os.getpid() != tests:
            os._exit(2)
