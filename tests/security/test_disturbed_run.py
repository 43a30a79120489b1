"""Signals at odd moments, closed pipes, few descriptors, small files: a message, and a resume with the same bits."""

import errno
import json
import os
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.job import MARK, worker
from tests.distributed.launcher import alone, start_command, wait_for_exit
from tests.support.forked_command import ForkedCommand, call
from tests.support.wait_until import wait_until

pytestmark = pytest.mark.slow
TRAIN = ["--data", "digits", "--model", "mlp", "--max-steps", "120", "--checkpoint-every", "10", "--exact", "--quiet"]
TRAIN += ["--global-batch-size", "128", "--batch-size", "64", "--log-interval", "2", "--save-dir", "run"]
ONE, TWO = ["--multi-gpu", "none"], ["--multi-gpu", "ddp", "--nproc-per-node", "2"]


def count_steps() -> int:
    file = Path("run/journal.jsonl")
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return max([json.loads(line).get("step", 0) for line in lines if line.endswith("\n")], default=0)


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory: pytest.TempPathFactory) -> str:
    home = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert call([*TRAIN, *ONE], home, home).code == 0
    found: str = json.loads((home / "run/summary.json").read_text())["fingerprint"]
    return found


@pytest.fixture(autouse=True)
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fingerprint: str) -> Callable[[], bool]:
    """Returns whether the same command ends with the bits of the undisturbed run."""
    monkeypatch.chdir(tmp_path)

    def resume() -> bool:
        outcome = call([*TRAIN, *ONE], tmp_path, tmp_path)
        assert outcome.code == 0, outcome
        return bool(json.loads(Path("run/summary.json").read_text())["fingerprint"] == fingerprint)

    return resume


def behave_like_a_command() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


SIGNALS = ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGALRM", "SIGUSR2", "SIGXCPU"]
MOMENTS = [*((name, None) for name in SIGNALS), *(("SIGINT", delay) for delay in (0.0, 0.02, 0.1, 0.4))]


@pytest.mark.parametrize(("name", "delay"), MOMENTS)
def test_run_resumes_with_the_same_bits_after_signals(
    name: str, delay: float | None, tmp_path: Path, resumed: Callable[[], bool]
) -> None:
    """SIGINT comes twice, some seconds apart."""
    number = signal.Signals[name]
    command = ForkedCommand([*TRAIN, *ONE], tmp_path, tmp_path, prepare=behave_like_a_command)
    wait_until(lambda: count_steps() >= 6 or command.is_over(), "six steps")
    os.kill(command.pid, number)
    if delay is not None:
        time.sleep(delay)
        with suppress(ProcessLookupError):
            os.kill(command.pid, number)
    outcome = command.wait()
    assert outcome.code in (0, 75, 130, -number, 128 + number), outcome
    assert "Traceback" not in outcome.text
    assert resumed()


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_group_resumes_with_the_same_bits_after_signals(name: str, tmp_path: Path, resumed: Callable[[], bool]) -> None:
    """Both workers and the launcher get it, as from a terminal; SIGINT twice."""
    process = start_command(alone(*TRAIN, *TWO), tmp_path)
    wait_until(lambda: count_steps() >= 6 or process.poll() is not None, "six steps", seconds=120)
    for _ in range(2 if name == "SIGINT" else 1):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.Signals[name])
        time.sleep(0.05)
    ended = wait_for_exit(process)
    assert ended.returncode in (0, 75, 1, 129, 130, -signal.SIGHUP, -signal.SIGINT), ended
    assert "Traceback" not in ended.stdout + ended.stderr
    assert resumed()


def test_suspended_rank_is_named_after_the_hang_timeout(tmp_path: Path, resumed: Callable[[], bool]) -> None:
    mark = str(tmp_path)
    process = start_command(alone(*TRAIN, *TWO, "--hang-timeout", "8"), tmp_path, **{MARK: mark})
    wait_until(lambda: count_steps() >= 6 or process.poll() is not None, "six steps", seconds=120)
    rank_1 = worker(mark, 1)
    assert rank_1 is not None
    os.kill(rank_1, signal.SIGSTOP)
    ended = wait_for_exit(process)
    assert ended.returncode == 1, ended
    assert "rank 1" in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert worker(mark, 1) is None
    assert resumed()


@pytest.mark.parametrize(
    "shell", ["{} | head -1", "{} 2>&1 | head -3", "{} >&- 2>&-", "{} < /dev/null > /dev/full 2>&1"]
)
def test_run_resumes_with_the_same_bits_without_its_output(
    shell: str, tmp_path: Path, resumed: Callable[[], bool]
) -> None:
    command = shell.format(shlex.join([word for word in alone(*TRAIN, *ONE) if word != "--quiet"]))
    ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode in (0, 1, 120, 141), ended
    assert "Traceback" not in ended.stdout + ended.stderr
    assert resumed()


LIMITS = [(resource.RLIMIT_NOFILE, amount) for amount in (64, 40, 24, 16)]
LIMITS += [(resource.RLIMIT_FSIZE, kib << 10) for kib in (1, 100, 300, 900)]


@pytest.mark.parametrize(("limit", "amount"), LIMITS)
def test_run_resumes_with_the_same_bits_after_limits(
    limit: int, amount: int, tmp_path: Path, resumed: Callable[[], bool]
) -> None:
    """Few open files, with two loader processes; or files that may not grow beyond a size."""
    loaders = ["--num-workers", "2"] if limit == resource.RLIMIT_NOFILE else []
    outcome = call(
        [*TRAIN, *ONE, *loaders], tmp_path, tmp_path, prepare=lambda: resource.setrlimit(limit, (amount,) * 2)
    )
    assert outcome.code in (0, 1, 2), outcome
    assert "Traceback" not in outcome.text
    assert resumed()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("loaders", ["0", "2"])
def test_run_resumes_with_the_same_bits_after_unreadable_data(number: int, loaders: str, tmp_path: Path) -> None:
    """A network disk answers with an error from some moment on, in the trainer's process or in its loaders'."""
    rows = "".join(json.dumps({"inputs": [at % 7 + 0.5, at % 5 + 0.5], "target": at % 2}) + "\n" for at in range(2000))
    Path("rows.jsonl").write_text(rows)
    words = ["--data", "jsonl", "--data-dir", "rows.jsonl", "--model", "mlp", "--max-steps", "60", "--exact", "--quiet"]
    words += ["--checkpoint-every", "10", "--log-interval", "2", "--batch-size", "16", "--num-workers", loaders, *ONE]
    assert call([*words, "--save-dir", "undisturbed"], tmp_path, tmp_path).code == 0

    def fail_once_trained() -> None:
        read = os.pread

        def pread(file: int, size: int, offset: int) -> bytes:
            if count_steps() >= 20:
                raise OSError(number, os.strerror(number))
            return read(file, size, offset)

        os.pread = pread

    outcome = call([*words, "--save-dir", "run"], tmp_path, tmp_path, prepare=fail_once_trained)
    assert outcome.code == (2 if number == errno.EACCES else 1), outcome
    assert "rows.jsonl" in outcome.text
    assert os.strerror(number) in outcome.text
    assert "Traceback" not in outcome.text
    assert call([*words, "--save-dir", "run"], tmp_path, tmp_path).code == 0
    summaries = [json.loads(Path(run, "summary.json").read_text()) for run in ("undisturbed", "run")]
    assert summaries[0]["fingerprint"] == summaries[1]["fingerprint"]


YEAR = 365 * 86400.0


@pytest.mark.parametrize("jump", [-20 * YEAR, -3600.0, 3600.0, 20 * YEAR])
def test_run_resumes_with_the_same_bits_after_the_clock_jumps(
    jump: float, tmp_path: Path, resumed: Callable[[], bool]
) -> None:
    """The clock jumps in the run, which is then stopped; the attempt that goes on has the true time again."""

    def jump_once_trained() -> None:
        behave_like_a_command()
        now = time.time
        time.time = lambda: now() + jump * (count_steps() >= 6)

    command = ForkedCommand([*TRAIN, *ONE], tmp_path, tmp_path, prepare=jump_once_trained)
    wait_until(lambda: count_steps() >= 20 or command.is_over(), "twenty steps")
    os.kill(command.pid, signal.SIGTERM)
    outcome = command.wait()
    assert outcome.code in (0, 75), outcome
    assert "Traceback" not in outcome.text
    assert resumed()
