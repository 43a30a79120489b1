"""Secrets of a run: --notify is in config.yaml alone, and texts of exceptions have no secret of the environment."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import text as texts

import main_multi_gpu
from multigpu_cli import engine
from multigpu_cli.config.resume_rules import choose_mode, replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import list_private, resolve
from multigpu_cli.config.yaml_text import drop_private, dump_config
from multigpu_cli.faults.explain import describe_error, hide_secrets
from multigpu_cli.loggers.sender import identify_run
from tests.support.run_training import run_training
from tests.tune.studies import make_study

pytestmark = pytest.mark.usefixtures("in_tmp_path")
HOOK = "SECRET-of-the-hook"
TOKEN, PASSWORD = "SECRET-of-the-environment", "SECRET-of-the-address"
MESSAGE = f"cannot reach https://me:{PASSWORD}@host with {TOKEN}"


def list_holders(secret: str, *folders: str) -> list[str]:
    """The files of folders that contain a secret; weights and checkpoints are archives without compression."""
    files = (file for folder in folders for file in Path(folder).rglob("*") if file.is_file())
    return sorted(str(file) for file in files if secret.encode() in file.read_bytes())


@pytest.mark.parametrize("origin", ["command", "recipe"])
def test_notify_is_in_a_private_config_yaml_alone(origin: str) -> None:
    """Nor does the plan in the journal quote it, if a recipe gives it."""
    command, mirror = f"true {HOOK}", f"file:{Path('mirror').absolute()}"
    Path("recipe.yaml").write_text(f"notify: {command}\n")
    given: dict[str, Any] = {"notify": command} if origin == "command" else {"recipe": "recipe.yaml"}
    ended = run_training(save_dir="run", max_steps=3, batch_size=8, mirror=mirror, **given)
    assert (ended.error, ended.summary["status"]) == ("", "completed")
    assert Path("mirror/config.yaml").is_file()
    assert list_holders(HOOK, "run", "mirror") == ["run/config.yaml"]
    assert Path("run/config.yaml").stat().st_mode & 0o777 == 0o600
    identity = identify_run(Path("run"))
    assert identity is not None
    assert "notify" not in identity.config


def test_resume_takes_no_notify_from_the_folder(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever unpacks a stranger's run folder owns its files: a config.yaml in it names no program, but is named."""
    command = "touch told"
    assert run_training(save_dir="run", max_steps=2, batch_size=8, notify=command).error == ""
    Path("told").unlink()
    assert run_training(save_dir="run", max_steps=4).summary["status"] == "completed"
    assert not Path("told").exists()
    assert "--notify is not taken from run/config.yaml" in capfd.readouterr().out
    assert run_training(save_dir="run", max_steps=6, notify=command).summary["status"] == "completed"
    assert Path("told").exists()
    assert "not taken" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "content", [None, b"", b"- a list\n", b"notify: [\n", b"\xff\xfe", b"a word", b"notify: true\n"]
)
def test_only_a_config_yaml_with_notify_is_named(content: bytes | None) -> None:
    if content is not None:
        Path("config.yaml").write_bytes(content)
    assert list_private(Path()) == (["notify"] if content == b"notify: true\n" else [])


@given(texts(min_size=1).filter(lambda words: "\0" not in words))
def test_drop_private_leaves_all_other_settings(words: str) -> None:
    """Also if the value is so long, or so odd, that YAML writes it on several lines."""
    config = replace_settings(Config(), {"epochs": 7, "max_restarts": 2})
    command = f"tell {shlex.quote(words)} " + "and more " * 30
    private = replace_settings(config, {"notify": command})
    assert drop_private(f"# a comment\n{dump_config(private)}".encode()).decode() == "# a comment\n" + "".join(
        line for line in dump_config(config).splitlines(keepends=True) if not line.startswith("notify:")
    )


def test_study_with_notify_is_private(tmp_path: Path) -> None:
    study = make_study(settings={"notify": f"true {HOOK}"})
    study.write(tmp_path)
    assert (tmp_path / "study.yaml").stat().st_mode & 0o777 == 0o600
    assert choose_mode({"epochs": 9}.get) == 0o666


def test_failed_run_quotes_no_secrets(capfd: pytest.CaptureFixture[str]) -> None:
    Path("record.sh").write_text('echo "$MULTIGPU_MESSAGE" >> told')

    def prepare() -> None:
        train_step = engine.train_step

        def step(run: Any, layout: Any, batches: Any) -> Any:
            if layout.step == 2:
                raise RuntimeError(MESSAGE)
            return train_step(run, layout, batches)

        engine.train_step = step  # type: ignore[assignment]

    command = f"sh '{Path('record.sh').absolute()}'"
    flags: dict[str, Any] = {"save_dir": "run", "max_steps": 4, "batch_size": 8, "notify": command}
    run_training(environ={"MY_TOKEN": TOKEN}, prepare=prepare, **flags)
    assert "RuntimeError: cannot reach https://…@host with …" in Path("told").read_text()
    assert json.loads(Path("run/summary.json").read_text())["error"].startswith("RuntimeError: cannot reach")
    assert list_holders("SECRET", "run") == []
    assert "SECRET" not in Path("told").read_text()


def test_errors_are_described_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "MY_TOKEN", TOKEN)
    for error in (RuntimeError(MESSAGE), main_multi_gpu.TrainingError(MESSAGE, remedy=MESSAGE)):
        for text in (describe_error(error), hide_secrets(repr(error))):
            assert "cannot reach https://…@host with …" in text
            assert "SECRET" not in text
    assert main_multi_gpu.run(["--model", f"{TOKEN}-x"]) == 2
    assert TOKEN not in capsys.readouterr().err


def test_resolved_config_yaml_keeps_notify() -> None:
    config = replace_settings(Config(), {"notify": f"true {HOOK}"})
    Path("config.yaml").write_text(dump_config(config))
    assert resolve({}, [], "config.yaml").fault.notify == f"true {HOOK}"
