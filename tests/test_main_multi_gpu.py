"""The front door: options reach the trainer, errors become exit codes and one message, torch stays out till needed."""

import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pexpect
import pytest
import typer

import main_multi_gpu
from multigpu_cli.commands import help
from multigpu_cli.commands.help import COMMON, TOPICS
from multigpu_cli.commands.options import with_train_options
from multigpu_cli.config.rules import OWN_RUN_ID
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.types import WITHOUT_FLAG
from multigpu_cli.distributed.launch_env import AttemptRefused, FinalVerdict
from multigpu_cli.errors import RequestError, TrainingError

SCRIPT = Path(main_multi_gpu.__file__)


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Trainer:
    """Stands in for train_multi_gpu: notes what it is asked and answers as told."""

    def __init__(self) -> None:
        self.asked: list[tuple[Config, str, bool]] = []
        self.answer: dict[str, Any] | BaseException = {"status": "completed"}

    def train(self, config: Config, *, screen: str, dry_run: bool) -> Any:
        self.asked.append((config, screen, dry_run))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()
    module = types.ModuleType("train_multi_gpu")
    module.train = trainer.train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "train_multi_gpu", module)
    return trainer


@pytest.fixture
def door(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def call(*argv: str) -> Said:
        code = main_multi_gpu.run(argv)
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr(time, "sleep", taken.append)
    return taken


Door = Callable[..., Said]


def test_flags_reach_the_trainer(door: Door, trainer: Trainer) -> None:
    argv = [
        "--epochs=3",
        "--lr",
        "4e-3",
        "--sync-bn",
        "--freeze",
        "a.*",
        "--freeze",
        "b",
        "--set",
        "model.args.width=8",
    ]
    assert door(*argv) == (0, "", "")
    [(config, screen, dry_run)] = trainer.asked
    assert (config.length.epochs, config.rate.lr, config.model.sync_bn) == (3, 0.004, True)
    assert (config.model.freeze, config.model.args) == (("a.*", "b"), {"width": 8})
    assert config.explicit == {"epochs", "lr", "sync_bn", "freeze", "model.args"}
    assert (screen, dry_run) == ("normal", False)


def test_every_flag_is_parsed_with_its_own_value(door: Door, trainer: Trainer, tmp_path: Path) -> None:
    values = {"gpu_ids": "0,1", "checkpoint_every": "10m", "bucket_cap_mb": "25", "num_workers": "2", "ema": "off"}
    (tmp_path / "t.csv").touch()
    paths = {"data_dir": str(tmp_path / "t.csv"), "save_dir": str(tmp_path / "run"), "resume": str(tmp_path)}
    for key, value in (values | paths).items():
        door(str(SETTINGS[key].flag), value)
        config = trainer.asked[-1][0]
        assert config.get(key) == SETTINGS[key].kind.parse(value)
        assert config.explicit == {key}


@pytest.mark.parametrize("status", ["completed", "stopped", "failed"])
def test_the_summarys_status_is_the_exit_code(door: Door, trainer: Trainer, status: str) -> None:
    trainer.answer = {"status": status}
    assert door().code == {"completed": 0, "stopped": 75, "failed": 1}[status]


def test_a_dry_run_is_asked_for_and_succeeds(door: Door, trainer: Trainer) -> None:
    trainer.answer = {}
    assert door("--dry-run").code == 0
    assert trainer.asked[0][2] is True


@pytest.mark.parametrize(
    ("argv", "screen"),
    [(["--quiet"], "quiet"), (["--verbose"], "verbose"), (["--json"], "json"), (["--json", "--quiet"], "json")],
)
def test_the_screen_is_chosen(door: Door, trainer: Trainer, argv: list[str], screen: str) -> None:
    door(*argv)
    assert trainer.asked[0][1] == screen


def test_screens_that_contradict_are_refused(door: Door) -> None:
    assert door("--quiet", "--verbose")[::2] == (2, "error: --verbose can't be used with --quiet\n  try: one of them\n")


def test_no_amp_is_amp_off(door: Door, trainer: Trainer) -> None:
    door("--no-amp")
    assert trainer.asked[0][0].precision.amp == "off"
    assert "--no-amp can't be used with --amp bf16" in door("--no-amp", "--amp", "bf16").err


def test_print_config_prints_yaml_that_config_takes(door: Door, trainer: Trainer, tmp_path: Path) -> None:
    code, out, err = door("--print-config", "--epochs", "3")
    assert (code, err, trainer.asked) == (0, "", [])
    file = tmp_path / "config.yaml"
    file.write_text(out)
    assert door("--print-config", "--config", str(file)).out == out
    assert "epochs: 3\n" in out


def test_the_version_names_torch_without_importing_it(door: Door) -> None:
    assert re.fullmatch(r"multigpu \S.* \(torch \S+, Python 3\.\d+\.\d+\)\n", door("--version").out)


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_a_screen_with_the_common_options_and_every_command(
    door: Door, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = door("--help")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 60
    assert max(map(len, out.splitlines())) <= columns
    assert "..." not in out, "a summary was cut"
    assert len(COMMON) == 15
    for name in (*COMMON, "help_all"):
        assert f"--{name.replace('_', '-')}" in out
    group: Any = typer.main.get_command(main_multi_gpu.app)
    for command in set(group.commands) - {"help"}:
        assert re.search(rf"^  {command} ", out, re.MULTILINE), command
    assert "\x1b" not in out


def test_help_has_colours_on_a_terminal_and_only_there() -> None:
    def lines(**environ: str) -> str:
        argv = [str(SCRIPT), "plan", "--help"]
        child = pexpect.spawn(sys.executable, argv, env={"TERM": "xterm-256color"} | environ, encoding="utf-8")
        text: str = child.read()
        child.close()
        return text

    assert "\x1b[1;36m--workers\x1b[0m \x1b[1;33mN,N\x1b[0m" in lines()
    assert "\x1b" not in lines(NO_COLOR="1")
    assert "\x1b" not in lines(TERM="dumb")


@pytest.mark.parametrize("command", ["plan", "bench", "doctor", "selftest"])
def test_a_command_names_its_own_options_and_refers_to_those_of_a_training(door: Door, command: str) -> None:
    code, out, err = door(command, "--help")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) < 20
    assert "--optimizer" not in out
    assert "--help-all" in out
    assert "--optimizer" in door(command, "--help-all").out


@pytest.mark.parametrize("topic", TOPICS)
def test_a_chapter_has_its_flags_and_its_settings_without_one(door: Door, topic: str) -> None:
    code, out, err = door("help", topic)
    title, page = TOPICS[topic]
    assert (code, err) == (0, "")
    assert out.startswith(f"{title}:\n")
    for setting in SETTINGS.values():
        found = re.search(rf"^  {re.escape(setting.flag or setting.key)}(?=\s)", out, re.MULTILINE)
        assert bool(found) == (setting.panel == title), setting.key
    assert out.endswith(f"\n\nMore: {SCRIPT.parent / 'docs' / page}\n")
    assert (SCRIPT.parent / "docs" / page).exists()


def test_help_names_no_page_that_is_not_there(door: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(help, "_DOCS", tmp_path)  # as beside an installed wheel
    for words in (["--help"], ["help", "data"]):
        assert "docs" not in door(*words).out
        assert "More:" not in door(*words).out


def test_help_of_a_command_is_the_commands_own_and_unknown_words_are_refused(door: Door) -> None:
    assert door("help", "verify").out == door("verify", "-h").out
    assert door("help").out == door("--help").out
    assert door("help", "optimiser") == (
        2, "", "error: help optimiser: no such chapter or command\n  try: did you mean 'optimizer'?\n",
    )  # fmt: skip


def test_usage_names_arguments_as_other_programs_do(door: Door) -> None:
    assert " status [OPTIONS] [RUN...]\n" in door("status", "-h").out
    assert " verify [OPTIONS] RUN_A RUN_B\n" in door("verify", "-h").out
    assert "  RUN_A  run folder\n" in door("verify", "-h").out
    assert "--no-own-code" not in door("export", "-h").out


def test_help_all_lists_every_flag_whole_under_its_panel(door: Door) -> None:
    code, out, err = door("--help-all")
    assert (code, err) == (0, "")
    for setting in SETTINGS.values():
        if setting.flag:
            assert re.search(rf"^  {setting.flag}\b", out, re.MULTILINE), setting.flag
            assert f"\n{setting.panel}:\n" in out
    for flag in ("--config", "--set", "--dry-run", "--print-config", "--quiet", "--json", "--debug", "--version"):
        assert re.search(rf"^  {flag}\b", out, re.MULTILINE), flag
    assert "[default: adamw]" in " ".join(out.split())
    assert re.search(r"^  recipes ", out, re.MULTILINE)


def test_an_option_before_a_command_is_refused_and_after_it_taken(door: Door) -> None:
    code, out, err = door("--json", "recipes")
    assert (code, out) == (2, "")
    assert "--json stands before the command 'recipes'" in err
    assert "recipes --json" in err
    code, out, err = door("recipes", "--json")
    assert (code, err) == (0, "")
    assert isinstance(json.loads(out), list)


def test_train_is_the_same_as_no_command(door: Door, trainer: Trainer) -> None:
    assert door("train", "--epochs", "3") == door("--epochs", "3") == (0, "", "")
    (named, *_), (bare, *_) = trainer.asked
    assert named == bare
    code, _, err = door("--epochs", "3", "train")
    assert code == 2
    assert "train --epochs" in err


def test_a_later_command_gets_the_same_options() -> None:
    def plan(context: Any, **values: Any) -> None: ...

    import inspect

    names = inspect.signature(with_train_options(plan)).parameters
    assert {key for key in SETTINGS if "." not in key} - WITHOUT_FLAG < set(names)


def test_errors_of_the_request_and_of_training_have_their_codes(door: Door, trainer: Trainer) -> None:
    trainer.answer = RequestError("--data-dir x: empty", remedy="fill it")
    assert door() == (2, "", "error: --data-dir x: empty\n  try: fill it\n")
    trainer.answer = TrainingError("the loss is NaN")
    assert door() == (1, "", "error: the loss is NaN\n")


def test_workers_that_spoke_themselves_leave_nothing_to_say(door: Door, trainer: Trainer) -> None:
    trainer.answer = TrainingError("")
    trainer.answer.exit_code = 75
    assert door() == (75, "", "")


def test_ctrl_c_is_130(door: Door, trainer: Trainer) -> None:
    trainer.answer = KeyboardInterrupt()
    assert door() == (130, "", "interrupted\n")


def test_an_error_of_the_users_code_shows_where_it_was(
    door: Door, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_net.py").write_text("def forward(x):\n    raise ValueError('label 12 is out\\nof range')\n")
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    my_net = importlib.import_module("my_net")
    monkeypatch.setattr(sys.modules["train_multi_gpu"], "train", lambda *_, **__: my_net.forward(1))
    code, out, err = door()
    assert (code, out) == (1, "")
    assert "error: training failed: ValueError: label 12 is out\n  of range\n" in err
    assert "my_net.py:2 forward: raise ValueError" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 15
    assert "Traceback (most recent call last)" in door("--debug").err


def test_long_messages_are_cut_to_a_screen_and_debug_shows_all(door: Door, trainer: Trainer) -> None:
    trainer.answer = RequestError("\n".join(f"rule {number}" for number in range(40)))
    err = door().err
    assert len(err.splitlines()) < 15
    assert "27 more lines" in err
    assert "rule 39" in door("--debug").err


RANK_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return tmp_path / "error.json"


def test_other_ranks_wait_and_say_nothing_at_the_door(door: Door, rank_1: Path, naps: list[float]) -> None:
    assert door("--epochs", "0") == (2, "", "")
    assert naps == [3.0]
    assert "--epochs must be" in json.loads(rank_1.read_text())["message"]["message"]


def test_the_first_rank_of_another_node_speaks_if_it_lives_on(
    door: Door, rank_1: Path, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert door("--data-dir", "/nowhere").err.startswith("rank 1: error: --data-dir /nowhere")
    assert naps == [3.0]


def test_a_rank_that_fails_in_training_speaks_unless_it_is_ended_first(
    door: Door, trainer: Trainer, rank_1: Path, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    trainer.answer = ValueError("a bad sample")
    assert door().err.startswith("rank 1: error: ")
    assert "Traceback" in json.loads(rank_1.read_text())["message"]["extraInfo"]["py_callstack"]
    monkeypatch.setenv("RANK", "0")
    trainer.answer = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")
    assert door().err.startswith("error: training failed: RuntimeError")
    assert naps == [3.0, 3.0]  # rank 0 only lost its peer, so it lets the peer speak


def test_a_node_that_only_lost_another_is_free_at_once(
    door: Door, trainer: Trainer, rank_1: Path, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent can't end anybody who has more to say."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    trainer.answer = TrainingError("rank 0 ended without an error message")
    trainer.answer.caused_by_peer = True
    for local in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local)
        door()
    assert naps == [0.0, 3.0]


def test_an_attempt_after_the_end_says_nothing(door: Door, trainer: Trainer, rank_1: Path) -> None:
    """Another node knew: what it knows has been said."""
    trainer.answer = AttemptRefused(FinalVerdict(75, "stopped by a signal", ("a", "b")))
    assert door() == (75, "", "")
    assert "stopped by a signal" in json.loads(rank_1.read_text())["message"]["message"]
    assert [file.name for file in rank_1.parent.iterdir()] == ["error.json"], "and its end is no verdict of its own"


def test_only_rank_0_prints_answers(door: Door, rank_1: Path) -> None:
    assert door("--print-config") == (0, "", "")
    assert door("--version") == (0, "", "")


def test_an_attempt_after_a_wrong_request_ends_at_once(
    door: Door, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{OWN_RUN_ID}1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    trainer.answer = {"status": "stopped"}
    assert door().code == 75
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert door() == (75, "", "")
    assert len(trainer.asked) == 1


def test_an_attempt_after_a_crash_in_a_later_step_trains(
    door: Door, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{OWN_RUN_ID}1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    error: Any = OSError("disk gone")
    error.failed_at = 3
    trainer.answer = error
    assert door().code == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    trainer.answer = {"status": "completed"}
    assert door().code == 0


def test_an_attempt_after_a_crash_before_the_first_step_ends_at_once(
    door: Door, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{OWN_RUN_ID}1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    trainer.answer = OSError("disk gone")
    code, _, said = door()
    assert (code, "no restart" in said) == (1, True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert door() == (1, "", "")


def everything() -> list[str]:
    """All flags with a value, as somebody would type them."""
    argv = ["--config", "har", "--set", "a.b=v"]
    for setting in SETTINGS.values():
        if setting.flag:
            argv += [setting.flag] if setting.default is False else [setting.flag, str(setting.default)]
    return [*argv, "--dry-run", "--print-config", "--quiet", "--verbose", "--json", "--debug", "--version", "--no-amp"]


def test_all_flags_pass_through_torchruns_own_parser() -> None:
    from torch.distributed.run import get_args_parser, parse_args

    given = everything()
    assert parse_args(["--nproc-per-node=2", str(SCRIPT), *given]).training_script_args == given
    theirs = [option for action in get_args_parser()._actions for option in action.option_strings]
    ours = [flag for flag in given if flag.startswith("--")]
    assert not [(flag, option) for flag in ours for option in theirs if option != flag and option.startswith(flag)]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["recipes"], 0),
        (["--epoch", "3"], 2),
        (["--epochs", "0"], 2),
        (["--set", "epochs=[1"], 2),
        (["--data", "no", "--config", "no"], 2),
        (["trian"], 2),
        (["--help-all"], 0),
        (["help", "data"], 0),
    ],
)
def test_nothing_heavy_is_imported_for_answers(argv: list[str], code: int) -> None:
    """What they cost is in the benchmarks; this is why it is little."""
    heavy = "{'torch', 'pydantic', 'numpy'}" + ("" if {"--config", "--set"} & set(argv) else " | {'yaml'}")
    ask = "import sys, main_multi_gpu; code = main_multi_gpu.run(sys.argv[1:]); "
    ask += f"print(code, ({heavy}) & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", ask, *argv], capture_output=True, text=True, cwd=SCRIPT.parent, check=True
    )
    assert done.stdout.endswith(f"{code} set()\n")


def test_cublas_gets_its_workspace_before_torch_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(main_multi_gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr(main_multi_gpu, "run", lambda argv: seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG")) or 0)
    monkeypatch.setattr(main_multi_gpu, "leave", sys.exit)
    with pytest.raises(SystemExit):
        main_multi_gpu.main()
    assert seen == [":4096:8"]


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    call = [sys.executable, str(SCRIPT), "--help"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as help:
        assert help.stdout
        assert help.stderr
        help.stdout.close()
        assert help.stderr.read() == ""
    assert help.returncode == 1


@pytest.mark.parametrize("module", ["main_multi_gpu", "multigpu_cli"])
def test_it_runs_as_a_module_too(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--epochs", "x"],
        capture_output=True,
        text=True,
        cwd=SCRIPT.parent,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --epochs must be a whole number from 1 to 1000000000, not 'x'\n"


def test_after_torch_the_process_ends_past_the_interpreters_exit() -> None:
    ask = (
        "import atexit, sys, types, main_multi_gpu\n"
        "atexit.register(lambda: print('exit handlers ran'))\n"
        "if sys.argv[1] == 'torch': sys.modules['torch'] = types.ModuleType('torch')\n"
        "print('last words', end='')\n"
        "main_multi_gpu.leave(75)\n"
    )
    for name, out in (("torch", "last words"), ("none", "last wordsexit handlers ran\n")):
        done = subprocess.run(
            [sys.executable, "-c", ask, name], capture_output=True, text=True, cwd=SCRIPT.parent, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (75, out, "")


def test_a_python_without_our_packages_is_told_where_they_are() -> None:
    bare = [sys.executable, "-S", "-I", str(Path(main_multi_gpu.__file__)), "--epochs", "3"]
    done = subprocess.run(bare, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"error: {sys.executable} has no package 'typer'",
        "  try: make quickstart, then: source .venv/bin/activate (or: pip install .)",
    ]
