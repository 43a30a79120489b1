"""What every test relies on: a clean environment, and real data where it is at hand."""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import typer
from hypothesis import HealthCheck, settings

from tests.support import safe_forks  # noqa: F401
from tests.support.huge_pages import collapse_pages
from tests.support.site import sitecustomize  # noqa: F401 - here too, for what a test imports and what it forks

ROOT = Path(__file__).resolve().parents[1]
_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
ALLOWED_SKIPS = (
    "no real data in ",
    "no earlier documents",
    "UCI HAR is not in ",
    "Fashion-MNIST is not in ",
    "there is a GPU",
    "says what a machine without GPUs gets",
    "root may write anywhere",
    "was not made by the Makefile",
)
"""What a reason to skip a test may hold where CI runs; any other is a failure: nobody reads CI's list of skips."""

LONG = (
    "tests/chaos",
    "tests/gpu/test_check_on_simulated.py",
    "tests/deploy",
    "tests/distributed",
    "tests/test_quickstart.py",
    "tests/test_readme.py",
    "tests/test_launch_multi_gpu.py",
    "tests/test_engine.py",
    "tests/commands/selftest",
    "tests/tune",
)
"""Files and folders whose tests take longest."""

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
_LOOKS = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE")
typer.main.get_command = cache(typer.main.get_command)  # 0.06 s in each of the many calls of the front door


def pytest_configure(config: pytest.Config) -> None:
    """Before torch is imported: whoever runs the tests may have been launched, or may like colours."""
    for name in [*_LAUNCHER, *_LOOKS, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    cache = tempfile.TemporaryDirectory(prefix="hf-")  # of tokens, and of what others keep there
    config.add_cleanup(cache.cleanup)
    os.environ["HF_HOME"] = cache.name
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share few cores
    if hasattr(os, "SCHED_BATCH"):  # a rank that sends goes on, instead of one that it wakes: gloo polls meanwhile
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")  # torch looks up names; a server that drops some
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background, and so all that it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup, which a shell hands on to its traps
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine
    settings.load_profile("here")
    if hasattr(config, "workerinput"):
        gc.disable()  # a third of the time of a collection of tests: what is imported stays
        sys.dont_write_bytecode = False  # for the other workers
        _rotate_files(config)


def _rotate_files(config: pytest.Config) -> None:
    """Each worker imports its own part of the files first, and the others' from the bytecode that they wrote meanwhile:
    pytest takes as long to rewrite assertions as to collect all else."""
    files: list[str] = []
    for given in config.args:
        files += map(str, sorted(Path(given).rglob("test_*.py"))) if Path(given).is_dir() else [given]
    worker: dict[str, Any] = config.workerinput  # type: ignore[attr-defined]
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args = files[first:] + files[:first]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest begins first: a long file that begins last keeps one worker alone at work."""
    if hasattr(config, "workerinput"):
        count = Counter(item.path for item in items)
        items.sort(key=lambda item: (not item.nodeid.startswith(LONG), -count[item.path], item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Every test is known, and most modules are imported: from here on workers fork, and collect their own garbage."""
    if hasattr(session.config, "workerinput"):
        gc.collect()
        gc.freeze()  # 800,000 objects, which each `gc.collect()` of a test would look through for half a second
        gc.get_freeze_count = cache(gc.get_freeze_count)
        gc.get_freeze_count()  # once, here: it counts them one by one, an eighth of what all runs would take
        gc.enable()
        collapse_pages()


def _fail_unlisted_skip(report: Report) -> Report:
    """In CI a test, or a file of them, that is skipped for a reason not on the list fails."""
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not any(allowed in reason for allowed in ALLOWED_SKIPS):
            report.outcome, report.longrepr = "failed", f"skipped, and not on the list of tests/conftest.py: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _fail_unlisted_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _fail_unlisted_skip((yield))


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's working directory is its own empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """The folder of a real dataset by name (har, fashion-mnist, …), or a skip that says where it was looked for."""

    def find(name: str) -> Path:
        given = os.environ.get("MULTIGPU_TEST_DATA")
        folder = (Path(given) if given else ROOT.parent / "shared" / "data") / name
        if not folder.is_dir():
            pytest.skip(f"no real data in {folder} (MULTIGPU_TEST_DATA may name another place)")
        return folder

    return find


@pytest.fixture(scope="session", autouse=True)
def _no_orphans() -> Iterator[None]:
    """Whatever a test leaves running would train on beside the next one, so it fails the session."""
    yield
    gc.collect()  # an object that is held by an exception's frames may have a process, which ends with it
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    left = children.read_text().split() if children.exists() else []
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in left]
    forked = Path("/proc/self/cmdline").read_bytes()
    trainers = [each for each in commands if b"main_multi_gpu" in each or b"torchrun" in each or each == forked]
    assert not trainers, f"still running: {trainers}"
