import os
from pathlib import Path

import pytest

import main_multi_gpu
from multigpu_cli.loggers.sender import hold_lock
from tests.commands.runs import interrupted_run
from tests.support.fork import exit_code
from tests.support.recording_logger import read_rows

ROOT = Path(__file__).resolve().parents[2]
OWN = "tests.support.recording_logger:Recorder"

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def run(*words: str) -> int:
    return exit_code(lambda: os._exit(main_multi_gpu.run(["log", *words])))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--to", "mlflow"], "nowhere: not a run folder"),
        (["run", "--to", "mlfow"], "did you mean 'mlflow'?"),
        (["run", "--to", "none"], "--to names no logger"),
        (["run", "--to", "https://me:geheim@host"], "--to must be a name, not an address"),
        (["run", "--to", "nothing_here:Log"], "there is no module 'nothing_here'"),
        (["run", "--to", "tests.support.recording_logger:WithoutLog"], "it has no method log and no close"),
    ],
)
def test_wrong_requests_touch_nothing(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    interrupted_run(Path("run"), seed=7)
    before = sorted(Path().rglob("*"))
    assert run(*words) == 2
    told = capfd.readouterr().err
    assert message in told
    assert "geheim" not in told
    assert sorted(Path().rglob("*")) == before


def test_it_sends_all_once_says_what_fails_and_sends_all_again_if_asked(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    interrupted_run(Path("run"), seed=7)
    Path("refuse").touch()
    assert run("run", "--to", OWN) == 1
    told = capfd.readouterr().err
    assert f"{OWN}: 60 lines not sent (OSError: no answer from https://…@host/api)" in told
    assert "run the same command again: it continues from there" in told
    Path("refuse").unlink()
    for _ in range(2):
        assert run("run", "--to", OWN) == 0
        assert capfd.readouterr().out == f"{OWN} has all of run\n"
        assert len(read_rows()) == 50
    assert run("run", "--to", OWN, "--again") == 0
    assert len(read_rows()) == 100
    with hold_lock(Path("run"), OWN):
        assert run("run", "--to", OWN) == 2
    assert f"run is already being sent to {OWN} by another process" in capfd.readouterr().err
