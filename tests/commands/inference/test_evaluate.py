"""`multigpu evaluate`: the metrics of a run's best weights, each sample once, on any number of workers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import main_multi_gpu
from multigpu_cli.commands import inference
from multigpu_cli.errors import RequestError
from tests.commands.several import outputs
from tests.support.run_training import run_training
from tests.support.user_inputs import Points, network
from train_multi_gpu import train_with_multi_gpu

OWN = ["--own-code", "--json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert run_training(save_dir=str(run), batch_size=5, epochs=3, lr=0.05).error == ""
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, "run")
    return Path("run")


def test_fault_of_a_run_is_named_though_its_config_yaml_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(RequestError, match=r"^no such data$"), inference._explain_objects(tmp_path / "best.pt"):
        raise RequestError("no such data")


def run_evaluate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main_multi_gpu.run(["evaluate", *words]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_test_metrics_are_those_of_the_run_to_the_last_bit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    final = json.loads((run / "summary.json").read_text())["final"]
    found = run_evaluate(capsys, "run", *OWN)
    assert (found["split"], found["samples"], found["weights"]) == ("test", 22, "run/best.pt")
    assert (found["loss"], found["accuracy"]) == (final["test_loss"], final["test_accuracy"])


def test_any_number_of_workers_finds_the_same(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    alone = run_evaluate(capsys, "run", *OWN, "--split", "val")
    speaking, *silent = outputs(3, ["evaluate", "run", *OWN, "--split", "val"], tmp_path)
    assert json.loads(speaking) == alone | {"world_size": 3}
    assert silent == ["", ""]


def test_other_arguments_of_the_data_and_another_batch(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_evaluate(capsys, "run", *OWN, "--split", "train", "--set", "data.args.train=33", "--batch-size", "7")
    assert (found["split"], found["samples"]) == ("train", 33)
    found = run_evaluate(capsys, "run", *OWN, "--data", "tests.support.user_code:Items")
    assert found["samples"] == 22


def test_people_see_the_metrics_and_the_tables(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["evaluate", "run", "--own-code"]) == 0
    out = capsys.readouterr().out
    assert "test" in out
    assert "accuracy" in out
    assert "(22 samples)" in out
    assert "precision" in out
    assert "true \\ predicted" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run"],
            "names code that this command does not name: --data tests.support.user_code:tensors, "
            "--model tests.support.user_code:net",
        ),
        (["nowhere"], "nowhere: there is no such file or folder"),
        (
            ["run", "--own-code", "--data", "tests.support.user_code:no_validation", "--split", "val"],
            "--split val: the data has",
        ),
        (["run", "--set", "epochs=3"], "--set epochs: only data, model and task can differ"),
        (["run", "--split", "tset"], "--split must be train or val or test, not 'tset'"),
        (["run", "--own-code", "--data", "digits"], "has other classes, scales or tokens"),
    ],
)  # fmt: skip
def test_what_can_not_be_evaluated_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main_multi_gpu.run(["evaluate", *words]) == 2
    assert said in capsys.readouterr().err


def test_weights_from_before_the_mark_are_still_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = torch.load("run/best.pt", weights_only=True)
    assert best["config"].pop("learned")
    torch.save(best, "run/best.pt")
    assert run_evaluate(capsys, "run", *OWN)["samples"] == 22


def test_a_policy_plays_the_episodes_of_the_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    acting: dict[str, Any] = {
        "data": "tests.support.toy_env:corridor",
        "task": "ppo",
        "model": "actor-critic",
        "num_envs": 2,
        "epochs": 1,
    }
    final = run_training(**acting, save_dir="acted", sets=["task.args.rollout=16"]).summary["final"]
    found = run_evaluate(capsys, "acted", *OWN)
    assert (found["samples"], found["reward"], found["length"]) == (20, final["test_reward"], final["test_length"])
    assert main_multi_gpu.run(["predict", "acted", "--own-code", "--out", "said.csv"]) == 2
    assert "--task ppo has episodes" in capsys.readouterr().err


class OfSize(Points):
    def __init__(self, size: int) -> None:
        super().__init__(size)


def test_a_run_from_python_says_where_it_can_be_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for words in (
        "optimizer      your SGD, no weight decay, gradient not clipped\n",
        "complete: nothing trained, run has",
    ):
        train_with_multi_gpu(
            model,
            DataLoader(OfSize(20)),
            optimizer,
            nn.CrossEntropyLoss(),
            save_dir="run",
            screen="normal",
            num_epochs=1,
        )
        assert words in capsys.readouterr().out
    for more, reason in ([], "names code"), (["--own-code"], "OfSize needs size"):
        assert main_multi_gpu.run(["evaluate", "run", *more]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert said.startswith("error: run/best.pt was made by a Python script, whose objects are not here: ")
        assert reason in said
        assert "try: evaluate_with_multi_gpu in that script, or" in said
        assert "add --own-code" not in said
