"""`multigpu sample`: text from a run's language model."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import main_multi_gpu
from multigpu_cli.language.prompts import draw_tokens, generate
from tests.support.run_training import run_training


class Next(nn.Module):
    """Expects the next number of seven, then the one after it, and sees no more than three tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= 3
        follows = nn.functional.one_hot((tokens + 1) % 7, 7) * 3.0
        return follows + nn.functional.one_hot((tokens + 2) % 7, 7) * 2.5


def test_the_likeliest_or_drawn_from_the_likely() -> None:
    start = torch.tensor([[0], [5]])

    def draw(count: int, seed: int = 1, temperature: float = 1.0, top_k: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        by = partial(draw_tokens, temperature=temperature, top_k=top_k, generator=generator)
        return generate(Next(), start, count, 3, by)

    assert generate(Next(), start, 4, 3).tolist() == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2]]
    assert torch.equal(draw(6, top_k=1), draw(6, temperature=0))
    drawn = [draw(200, seed, top_k=2) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    steps = (drawn[0][:, 1:] - drawn[0][:, :-1]) % 7
    assert set(steps.flatten().tolist()) == {1, 2}
    share = float((steps == 1).float().mean())
    assert share == pytest.approx(1 / (1 + 2.718281828**-0.5), abs=0.06)
    assert set(draw(400, temperature=50.0).flatten().tolist()) == set(range(7))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    Path("text/input.txt").write_text("abcdef\n" * 300)
    flags: dict[str, Any] = {"data": "text", "data_dir": "text", "model": "gpt", "save_dir": "run", "num_workers": 0}
    sets = ["data.block=12", "model.depth=1", "model.width=16", "model.heads=2"]
    assert not run_training(1, **flags, sets=sets, epochs=5, base_lr="2e-2").error
    return "run"


def test_a_run_continues_a_prompt_in_its_own_characters(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree("text")
    for place in (run, next(Path(run, "checkpoints").iterdir())):
        words = ["--prompt", "ab", "--length", "20", "--temperature", "0"]
        assert main_multi_gpu.run(["sample", str(place), *words]) == 0, "without the text that it was trained on"
        assert capsys.readouterr().out == "abcdef\nabcdef\nabcdef\na\n"
    for words, said in (
        (["--prompt", "abX"], "the characters 'X' are not among those the model was trained on"),
        (["--prompt", ""], "--prompt is empty"),
        (["--top-k", "0"], "--top-k must be a whole number"),
    ):
        assert main_multi_gpu.run(["sample", run, *words]) == 2
        assert said in capsys.readouterr().err


def test_a_network_of_ones_own_is_named_or_allowed(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("written.py").write_text(
        "from torch import nn\n\n"
        "def net(num_classes):\n    return nn.Sequential(nn.Embedding(num_classes, 8), nn.Linear(8, num_classes))\n"
    )
    flags: dict[str, Any] = {"data": "text", "data_dir": "text", "model": "written:net", "save_dir": "own"}
    assert not run_training(1, **flags, sets=["data.block=12"], max_steps=2).error
    words = ["sample", "own", "--prompt", "ab", "--length", "2"]
    assert main_multi_gpu.run(words) == 2
    assert "--model written:net" in capsys.readouterr().err
    for leave in (["--model", "written:net"], ["--own-code"]):
        assert main_multi_gpu.run([*words, *leave]) == 0
        assert len(capsys.readouterr().out) == 5


def test_only_a_language_model_writes_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(save_dir=str(tmp_path / "run"), epochs=1)
    assert main_multi_gpu.run(["sample", str(tmp_path / "run")]) == 2, "before its network is made"
    assert "the task of this run is classification" in capsys.readouterr().err
