"""The command `export`, from a run that was trained to a file that somebody else loads."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import main_multi_gpu
from multigpu_cli.checkpoint.weights import read_weights
from multigpu_cli.commands.export import export_run
from multigpu_cli.commands.requests import ExportTarget, InferenceRequest
from multigpu_cli.errors import RequestError
from tests.support.run_training import run_training
from tests.support.user_code import net

NETWORK = ExportTarget(Path("net.pt2"))


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
    told = export_run(InferenceRequest(run=checkpoint, own_code=True), NETWORK)
    assert told.difference < 1e-5
    model, inputs = net((6,), 3), torch.randn(4, 6)
    model.load_state_dict(read_weights(run / "last.pt"))
    torch.testing.assert_close(torch.export.load("net.pt2").module()(inputs), model.eval()(inputs))


def test_code_that_a_checkpoint_names_does_not_run_unasked(run: Path) -> None:
    with pytest.raises(
        RequestError,
        match=r"does not name: --data tests\.support\.user_code:tensors, --model tests\.support\.user_code:net",
    ):
        export_run(InferenceRequest(run=run), NETWORK)
    assert not Path("net.pt2").exists()


def test_weights_that_do_not_fit_the_model_are_refused_by_name(run: Path) -> None:
    found = torch.load("run/best.pt", weights_only=True)
    found["model"].pop("2.weight")
    torch.save(found, "run/best.pt")
    with pytest.raises(RequestError, match=r"does not fit the model:\n.*2\.weight is missing"):
        export_run(InferenceRequest(run=run, own_code=True), NETWORK)


def test_a_place_that_cannot_be_written_to_is_a_wrong_request(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 250
    assert main_multi_gpu.run(["export", "run", "--to", f"{long}.pt"]) == 2
    assert capsys.readouterr().err.startswith(f"error: --to {long}.pt: File name too long\n")


def write_toys(count: int) -> list[dict[str, str]]:
    """toys.csv, where kind and price follow from the size, and new.csv, with words and gaps of its own."""
    colours = ["red", "green, dark", "", "NA", *(f"rare {at}" for at in range(70))]
    toys = [
        {
            "size": f"{at % 13}.5",
            "weight": "" if at % 7 == 1 else str(at % 5),
            "colour": colours[at % 5 if at % 3 else at % 74],
        }
        for at in range(count)
    ]
    for at, toy in enumerate(toys):
        toy |= {"kind": "big" if at % 13 > 6 else "small", "price": str(1e6 + 1e4 * (at % 13) + 0.5)}
    new = [
        {"size": "3.25", "weight": "?", "colour": "red"},
        {"size": "", "weight": "2", "colour": "nobody knows"},
        {"size": "-1e3", "weight": "nan", "colour": "None"},
        {"size": "12.5", "weight": "4", "colour": "rare 3"},
    ]
    for name, rows in (("toys.csv", toys), ("new.csv", new)):
        with open(name, "w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    return new


@pytest.mark.parametrize(("target", "ignored"), [("kind", "price"), ("price", "kind")])
def test_a_table_as_onnx_takes_raw_rows_and_predicts_as_predict_does(
    target: str, ignored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    new = [row | {"column_2": row["weight"]} for row in write_toys(400)]
    for place in (Path("toys.csv"), Path("new.csv")):
        place.write_text(place.read_text().replace("size,weight,", "size,,", 1))  # a column without a name
    sets = [f"data.target={target}", f"data.ignore={ignored}", "model.width=16"]
    flags: dict[str, Any] = {"data": "toys.csv", "model": "mlp", "epochs": 2, "num_workers": 0, "lr": 0.01}
    assert run_training(save_dir="run", sets=sets, **flags).error == ""
    assert main_multi_gpu.run(["predict", "run", "--set", "data.new=new.csv", "--out", "predicted.csv"]) == 0
    assert main_multi_gpu.run(["export", "run", "--to", "toys.onnx"]) == 0
    assert "takes raw columns" in capsys.readouterr().out
    session = onnxruntime.InferenceSession("toys.onnx")
    assert {each.name: each.type for each in session.get_inputs()} == {
        "size": "tensor(double)",
        "column_2": "tensor(double)",
        "colour": "tensor(string)",
    }
    numbers = {
        name: np.array([float(row[name].replace("?", "") or "nan") for row in new]) for name in ("size", "column_2")
    }
    fed = numbers | {"colour": np.array([row["colour"] for row in new], dtype=object)}
    found = dict(zip([each.name for each in session.get_outputs()], session.run(None, fed), strict=True))
    with open("predicted.csv", newline="") as file:
        predicted = list(csv.DictReader(file))
    if target == "kind":
        assert list(found["prediction"]) == [row["prediction"] for row in predicted]
        assert found["probability"].max(1).tolist() == pytest.approx(
            [float(row["probability"]) for row in predicted], rel=1e-5
        )
    else:
        assert found["prediction"].tolist() == pytest.approx([float(row["prediction"]) for row in predicted], rel=1e-6)


def test_a_table_as_pt2_has_its_preprocessing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_toys(400)
    sets = ["data.target=price", "data.ignore=kind", "model.width=16"]
    flags: dict[str, Any] = {"data": "toys.csv", "model": "mlp", "max_steps": 2, "num_workers": 0}
    assert run_training(save_dir="run", sets=sets, **flags).error == ""
    assert main_multi_gpu.run(["export", "run", "--to", "toys.pt2"]) == 0
    assert "takes features, not rows: toys.pt2.json" in capsys.readouterr().out
    known = json.loads(Path("toys.pt2.json").read_text())
    assert [each["column"] for each in known["numbers"] + known["gaps"] + known["categories"]] == [
        "size", "weight", "weight", "colour",
    ]  # fmt: skip
    size, colour = known["numbers"][0], known["categories"][0]
    assert size["median"] == pytest.approx(6.5, abs=1)
    assert colour["words"][colour["other"]] == [word for word in colour["words"][-1] if word.startswith("rare")]
    assert ["missing"] in colour["words"]
    Path("toys.pt2").unlink()
    assert main_multi_gpu.run(["export", "run", "--to", "toys.pt2"]) == 2
    assert "toys.pt2.json exists already" in capsys.readouterr().err
