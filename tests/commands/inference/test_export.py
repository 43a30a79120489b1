"""The command `export`, from a run that was trained to a file that somebody else loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import main_multi_gpu
from multigpu_cli.checkpoint.weights import read_weights
from multigpu_cli.commands.inference.export import export_run
from multigpu_cli.errors import RequestError
from tests.support.run_training import run_training
from tests.support.user_code import net


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert run_training(save_dir=str(run), batch_size=10, epochs=2, ema=0.9, grad_checkpointing=True).error == ""
    return run


@pytest.fixture
def run(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained_run, "run")
    return Path("run")


def test_weights_of_a_run_are_those_of_best_pt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["export", "run", "--to", "w.pt", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], told["origin"], told["difference"]) == ("w.pt", "run/best.pt", 0.0)
    found, best = torch.load("w.pt", weights_only=True), read_weights(run / "best.pt")
    assert found.keys() == best.keys()
    assert all(torch.equal(found[name], best[name]) for name in best)


def test_the_network_of_a_checkpoint_is_the_average_that_was_evaluated(run: Path) -> None:
    """The last checkpoint's average is what last.pt holds."""
    checkpoint = max((run / "checkpoints").iterdir())
    told = export_run(str(checkpoint), Path("net.pt2"), own_code=True)
    assert told.difference < 1e-5
    model, inputs = net((6,), 3), torch.randn(4, 6)
    model.load_state_dict(read_weights(run / "last.pt"))
    torch.testing.assert_close(torch.export.load("net.pt2").module()(inputs), model.eval()(inputs))


def test_code_that_a_checkpoint_names_does_not_run_unasked(run: Path) -> None:
    with pytest.raises(
        RequestError, match=r"does not: --data tests\.support\.user_code:tensors, --model tests\.support\.user_code:net"
    ):
        export_run("run", Path("net.pt2"))
    assert not Path("net.pt2").exists()


def test_weights_that_do_not_fit_the_model_are_refused_by_name(run: Path) -> None:
    found = torch.load("run/best.pt", weights_only=True)
    found["model"].pop("2.weight")
    torch.save(found, "run/best.pt")
    with pytest.raises(RequestError, match=r"does not fit the model:\n.*2\.weight is missing"):
        export_run("run", Path("net.pt2"), own_code=True)


def test_a_place_that_cannot_be_written_to_is_a_wrong_request(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 250
    assert main_multi_gpu.run(["export", "run", "--to", f"{long}.pt"]) == 2
    assert capsys.readouterr().err.startswith(f"error: --to {long}.pt: File name too long\n")
