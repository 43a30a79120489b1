import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.factories import call_factory, find_factory

REGISTRY = {"joined": "os.path:join", "sorted": "builtins:sorted"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's module in it."""
    (tmp_path / "mine_for_plugins.py").write_text(
        "LIMIT = 3\n"
        "def build(input_shape, width=8, **rest):\n"
        "    return input_shape, width, rest\n"
        "class Nest:\n"
        "    @staticmethod\n"
        "    def inner(seed):\n"
        "        return seed\n"
    )
    (tmp_path / "broken_for_plugins.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("mine_for_plugins", "broken_for_plugins", "wave"):
        sys.modules.pop(name, None)


def test_a_name_of_the_registry() -> None:
    assert find_factory("joined", REGISTRY, flag="--data")("a", "b") == str(Path("a/b"))


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(RequestError, match="--data: unknown name 'jioned'") as refused:
        find_factory("jioned", REGISTRY, flag="--data")
    assert "did you mean 'joined'?" in refused.value.remedy
    assert "module:factory" in refused.value.remedy


def test_the_users_own_file_in_the_working_directory(own: Path) -> None:
    assert find_factory("mine_for_plugins:build", REGISTRY, flag="--model")(1) == (1, 8, {})
    assert find_factory("mine_for_plugins:Nest.inner", REGISTRY, flag="--model")(5) == 5


def test_the_working_directory_comes_before_installed_packages(own: Path) -> None:
    (own / "wave.py").write_text("def load():\n    return 'mine'\n")
    sys.modules.pop("wave", None)
    assert find_factory("wave:load", {}, flag="--data")() == "mine"


def test_other_files_there_are_not_taken_for_pythons_own_modules(own: Path) -> None:
    (own / "wave.py").write_text("raise RuntimeError('not this one')\n")
    (own / "mine_for_plugins.py").write_text("def read():\n    import wave\n    return wave\n")
    sys.modules.pop("wave", None)
    assert find_factory("mine_for_plugins:read", {}, flag="--data")().Wave_read


@pytest.mark.parametrize(
    ("name", "problem", "remedy"),
    [
        ("nowhere_for_plugins:build", "there is no module 'nowhere_for_plugins' in", "run from the folder"),
        ("os.nowhere:build", "there is no module 'os.nowhere'", "spelling"),
        ("mine_for_plugins:biuld", "has no 'biuld'", "did you mean 'build'?"),
        ("mine_for_plugins:LIMIT", "'LIMIT' is of type int, which is not callable", ""),
    ],
)
def test_what_cannot_be_found_is_named(own: Path, name: str, problem: str, remedy: str) -> None:
    with pytest.raises(RequestError) as refused:
        find_factory(name, REGISTRY, flag="--model")
    assert f"--model {name}" in refused.value.problem
    assert problem in refused.value.problem
    assert remedy in refused.value.remedy


def test_what_the_users_module_lacks_is_not_blamed_on_its_name(own: Path) -> None:
    with pytest.raises(RequestError, match="importing broken_for_plugins raised ModuleNotFoundError in broken_for_pl"):
        find_factory("broken_for_plugins:build", REGISTRY, flag="--model")


@pytest.mark.parametrize(
    "line",
    ["from multigpu_cli.errors import AnOldName", "import multigpu_cli.an_old_room", "import multigpu_cli.data.old"],
)
def test_what_is_not_there_of_ours_has_another_name_now(own: Path, line: str) -> None:
    (own / "broken_for_plugins.py").write_text(f"{line}\n")
    with pytest.raises(RequestError, match=r"in broken_for_plugins\.py:1") as refused:
        find_factory("broken_for_plugins:build", REGISTRY, flag="--task")
    assert "the current name" in refused.value.remedy


def test_a_module_that_is_no_python_is_named_with_its_line(own: Path) -> None:
    (own / "broken_for_plugins.py").write_text("x = 1\ndef build(:\n")
    with pytest.raises(RequestError, match=r"raised SyntaxError in broken_for_plugins\.py:2"):
        find_factory("broken_for_plugins:build", REGISTRY, flag="--data")


def test_a_factory_gets_what_it_names_and_the_users_own_words_win() -> None:
    def build(seed: int, width: int = 4) -> tuple[int, int]:
        return seed, width

    offered = {"seed": 42, "num_classes": 10, "width": 64}
    assert call_factory(build, offered, {}, where="model") == (42, 64)
    assert call_factory(build, offered, {"width": 7, "seed": 1}, where="model") == (1, 7)


def test_a_factory_that_takes_anything_gets_the_arguments_but_not_the_offers() -> None:
    def build(**named: object) -> dict[str, object]:
        return named

    assert call_factory(build, {"seed": 42}, {"depth": 3}, where="model") == {"depth": 3}


def test_an_argument_that_the_factory_does_not_take_gets_a_suggestion() -> None:
    def build(seed: int, width: int = 4) -> None: ...

    with pytest.raises(RequestError, match=r"model\.args\.widht: .*build has no such parameter") as refused:
        call_factory(build, {"seed": 1}, {"widht": 3}, where="model")
    assert "did you mean 'width'?" in refused.value.remedy


def test_a_setting_of_ours_that_is_misspelt_is_among_the_suggestions() -> None:
    def build(num_classes: int) -> None: ...

    for where, written, meant in (
        ("task", "class_weight", "class_weights"),
        ("model", "unfreze_at", "unfreeze_at"),
        ("optimizer", "layer_decy", "layer_decay"),
    ):
        with pytest.raises(RequestError) as refused:
            call_factory(build, {}, {written: 1}, where=where)
        assert refused.value.remedy == f"did you mean '{meant}'?"


def test_a_parameter_that_nobody_fills_says_how_to_fill_it() -> None:
    def build(heads: int, seed: int) -> None: ...

    with pytest.raises(RequestError, match="needs heads") as refused:
        call_factory(build, {"seed": 1}, {}, where="model")
    assert "--set model.args.heads=" in refused.value.remedy
    assert "seed" in refused.value.remedy


def test_a_class_is_a_factory_too() -> None:
    class Net:
        def __init__(self, num_classes: int) -> None:
            self.num_classes = num_classes

    assert call_factory(Net, {"num_classes": 3, "seed": 1}, {}, where="model").num_classes == 3


def test_a_script_that_parses_its_command_line_has_its_defaults(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "from argparse import ArgumentParser\nparser = ArgumentParser()\n"
    (own / "mine_for_plugins.py").write_text(
        script + "parser.add_argument('--epochs', default=3)\nLIMIT = parser.parse_args().epochs\n"
        "def build():\n    return LIMIT\n"
    )
    monkeypatch.setattr(sys, "argv", ["main_multi_gpu.py", "--data", "mine:dataset"])
    assert find_factory("mine_for_plugins:build", {}, flag="--model")() == 3
    assert sys.argv == ["main_multi_gpu.py", "--data", "mine:dataset"]


def test_a_script_that_ends_when_it_is_imported_is_named(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "from argparse import ArgumentParser\nparser = ArgumentParser()\nparser.add_argument('folder')\n"
    (own / "mine_for_plugins.py").write_text(f"{script}parser.parse_args()\ndef build():\n    pass\n")
    with pytest.raises(RequestError, match=r"--model mine_for_plugins:build: importing .* ends the program") as refused:
        find_factory("mine_for_plugins:build", {}, flag="--model")
    assert "build in a file of its own" in refused.value.remedy
    assert "main_multi_gpu" not in capsys.readouterr().err, "their usage, under their name"
