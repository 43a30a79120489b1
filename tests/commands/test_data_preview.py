import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from main_multi_gpu import run
from multigpu_cli.commands.language.samples import choose_marks
from tests.support.tiny_language_models import make_model_folder

pytest.importorskip("transformers", reason="transformers is not installed")

TALKS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4\x1b[2J"}],
    [{"role": "user", "content": "Why? " * 4}, {"role": "assistant", "content": "So that it is long."}],
    [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "é"}],
]
RECIPE = """
data: {name: chat, args: {val: 0, overlong: truncate}}
data_dir: talks.jsonl
model: pretrained
model_dir: model
max_length: 45
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("preview")
    make_model_folder(made / "model")
    (made / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    (made / "recipe.yaml").write_text(RECIPE)
    return made


def preview(*options: str) -> int:
    return run(["data", "preview", "--config", "recipe.yaml", *options])


def test_what_is_learned_is_marked(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    assert preview("--samples", "2") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("3 samples (messages) of ")
    text = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n⟦4\\x1b[2J<|im_end|>⟧\n"
    assert re.search(r"talks\.jsonl:1: \d+ tokens, \d+ learned\n" + re.escape(text), shown), "ESC is written out"
    assert "talks.jsonl:2: " in shown
    assert " tokens, cut to 45, " in shown
    assert "talks.jsonl:3" not in shown
    twice = {"messages": [*TALKS[0], TALKS[0][0], TALKS[0][1] | {"weight": 0}]}
    Path("marked.jsonl").write_text(json.dumps(twice) + "\n")
    assert preview("--data-dir", "marked.jsonl", "--max-length", "64") == 0
    assert capsys.readouterr().out.count("⟦4\\x1b[2J<|im_end|>⟧") == 1


def test_what_the_template_leaves_out_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    said = TALKS[0][1] | {"reasoning_content": "Two and two."}
    Path("thoughts.jsonl").write_text(json.dumps({"messages": [TALKS[0][0], said]}) + "\n")
    assert preview("--data-dir", "thoughts.jsonl") == 0
    shown = capsys.readouterr().out
    assert "thoughts.jsonl:1: the chat template leaves the thought of message 2 out: it is not learned" in shown


def test_as_json_and_with_flags_beside_the_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    assert preview("--json", "--set", "data.loss_on=all", "--packing", "off", "--max-length", "64") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_length"] == 64
    assert "packs" not in found["data"]
    last = found["samples"][2]
    assert last["place"] == "talks.jsonl:3"
    assert last["learned"] == last["length"] - 1 == len(last["tokens"]) - 1, "nothing foretells the first"
    assert [each["learned"] for each in last["stretches"]] == [False, True]
    assert "".join(each["text"] for each in last["stretches"]).endswith("é<|im_end|>\n")
    assert not last["truncated"]


def test_what_has_no_tokens_is_refused_before_anything_loads(capsys: Any) -> None:
    assert run(["data", "preview", "--data", "digits"]) == 2
    assert "--data digits has no tokens" in capsys.readouterr().err
    assert run(["data", "previw"]) == 2
    assert "'preview'" in capsys.readouterr().err


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    assert choose_marks(terminal, {}) == ("⟦", "⟧")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert choose_marks(terminal, {})[0].startswith("\x1b[")
    assert choose_marks(terminal, {"NO_COLOR": "1"}) == ("⟦", "⟧")
