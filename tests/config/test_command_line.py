"""A run's settings as the command line that gives them again."""

from pathlib import Path

import pytest

import main_multi_gpu
from multigpu_cli.config.sources import resolve
from multigpu_cli.config.yaml_text import list_arguments

WRITTEN = [
    "--lr=0.003 --optimizer=sgd --set optimizer.momentum=0.8",
    "--exact --freeze stem.* --freeze head.* --max-grad-norm off --ema 0.99 --checkpoint-every 10m",
    "--batch-size auto --weight-decay 1e-05 --gpu-ids 0,2 --multi-gpu dp --data-on-device on",
]


@pytest.mark.parametrize("given", WRITTEN)
def test_typed_again_it_gives_the_same_settings(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def settings(words: list[str]) -> str:
        assert main_multi_gpu.run([*words, "--print-config"]) == 0
        return capsys.readouterr().out

    written = settings(given.split())
    (tmp_path / "config.yaml").write_text(written)
    assert settings(list_arguments(resolve({}, [], str(tmp_path / "config.yaml")))) == written


def test_arguments_of_parts_are_written_as_yaml() -> None:
    args = {"data.args": {"path": "my table.csv", "ignore": ["id", "1e3"], "rate": 1e-5, "deep": {"on": "yes"}}}
    words = list_arguments(resolve(args, [], None))
    assert resolve({}, words[1::2], None).data.args == args["data.args"]
    assert set(words[::2]) == {"--set"}


def test_defaults_need_no_words() -> None:
    assert list_arguments(resolve({"save_dir": "x", "resume": "never", "epochs": 20}, [], None)) == []
