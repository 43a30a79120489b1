"""The list of recipes: names and descriptions, as a table or as JSON."""

import json
from pathlib import Path

import pytest

import main_multi_gpu
from multigpu_cli.config.paths import format_recipes, list_recipes


@pytest.fixture(autouse=True)
def _two_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yaml").write_text("# Trains a,\n# quickly.\nseed: 1\n# not this\n")
    (tmp_path / "configs" / "long_name.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path)


def test_recipes_are_listed_with_the_comment_they_begin_with() -> None:
    found = {recipe.name: recipe.description for recipe in list_recipes()}
    assert (found["a"], found["long_name"]) == ("Trains a, quickly.", "")


def test_they_are_shown_one_a_line() -> None:
    own = [recipe for recipe in list_recipes() if recipe.name in ("a", "long_name")]
    assert list(format_recipes(own)) == ["a          Trains a, quickly.", "long_name  "]


def test_they_are_shown_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["recipes", "--json"]) == 0
    assert {"a", "long_name"} <= {recipe["name"] for recipe in json.loads(capsys.readouterr().out)}


def test_none_is_said_so() -> None:
    assert "./configs" in "".join(format_recipes([]))
