"""`multigpu predict`: one row a sample, in order, on any number of workers."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import main_multi_gpu
from tests.commands.several import outputs
from tests.distributed.forked import run_forked
from tests.distributed.launcher import alone
from tests.support.run_training import run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def run(**flags: Any) -> dict[str, Any]:
    ended = run_training(save_dir="run", batch_size=5, epochs=3, lr=0.05, num_workers=0, **flags)
    assert not ended.error, ended.error
    return ended.summary


def rows(file: str) -> list[dict[str, str]]:
    with open(file, newline="") as table:
        return list(csv.DictReader(table))


def test_each_sample_once_and_in_order_on_any_number_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run()
    assert main_multi_gpu.run(["predict", "run", "--own-code", "--out", "one.csv"]) == 0
    assert "one.csv  22 samples of the test split, weights from run/best.pt" in capsys.readouterr().out
    for workers in (2, 3):
        outputs(workers, ["predict", "run", "--own-code", "--out", f"{workers}.csv"], tmp_path)
        assert Path(f"{workers}.csv").read_text() == Path("one.csv").read_text()
    table = rows("one.csv")
    assert [row["sample"] for row in table] == [str(at) for at in range(22)]
    assert [row["target"] for row in table] == [str(at % 3) for at in range(22)]
    right = sum(row["prediction"] == row["target"] for row in table) / 22
    assert right == pytest.approx(summary["final"]["test_accuracy"])
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in table)


def test_it_starts_its_workers_itself() -> None:
    run()
    words = alone("predict", "run", "--own-code", "--out", "two.csv", nproc_per_node=2)
    done = run_forked(words, Path.cwd(), forked_workers=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["two.csv  22 samples of the test split, weights from run/best.pt"]
    main_multi_gpu.run(["predict", "run", "--own-code", "--out", "one.csv"])
    assert Path("two.csv").read_text() == Path("one.csv").read_text()


@pytest.mark.parametrize(("width", "names"), [(1, ["target", "prediction"]), (2, ["target 0", "target 1"])])
def test_numbers_are_in_their_own_unit(width: int, names: list[str]) -> None:
    inputs = np.random.default_rng(0).normal(size=(60, 3))
    np.savez("data.npz", X=inputs, y=1e3 * inputs[:, :width] if width > 1 else 1e3 * inputs[:, 0])
    summary = run(data="npz", data_dir=".", model="mlp")
    assert main_multi_gpu.run(["predict", "run", "--out", "said.csv", "--split", "val"]) == 0
    table = rows("said.csv")
    assert len(table) == 6
    assert set(names) <= set(table[0])
    if width == 1:
        error = np.mean([abs(float(row["target"]) - float(row["prediction"])) for row in table])
        assert error == pytest.approx(summary["best"]["val_mae"], rel=1e-6)


def test_a_table_comes_back_with_names_and_the_scale_of_its_own_training_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = ["size,price", *(f"{at % 17},{1e6 + 1e4 * (at % 17)}" for at in range(100))]
    Path("homes.csv").write_text("\n".join(lines))
    Path("new.csv").write_text("size,price\n3,1030000\n16,1160000\n")
    summary = run(
        data="csv", data_dir=".", model="mlp", sets=["data.target=price", "data.file=homes.csv", "data.kind=regression"]
    )
    words = ["predict", "run", "--out", "said.csv", "--set"]
    assert main_multi_gpu.run([*words, "data.args.file=new.csv"]) == 2, "not enough rows to train on"
    Path("other.csv").write_text("\n".join(lines[:40]))
    assert main_multi_gpu.run([*words[:-1], "--data-dir", "other.csv"]) == 2
    assert "--data-dir other.csv can't be used with data.file=homes.csv" in capsys.readouterr().err
    assert main_multi_gpu.run([*words, "data.file=other.csv"]) == 2, "another scale than the run's"
    assert "other rows: --set data.test_file=FILE or data.new=FILE" in capsys.readouterr().err
    assert main_multi_gpu.run([*words, "data.args.test_file=new.csv"]) == 0
    assert [float(row["target"]) for row in rows("said.csv")] == [1_030_000, 1_160_000]
    assert all(9e5 < float(row["prediction"]) < 1.3e6 for row in rows("said.csv"))
    assert summary["final"]["test_mae"] < 2e5


def unknown(data: str, new: str, *words: str, data_dir: str = ".") -> list[dict[str, str]]:
    """The table of samples whose targets nobody knows, after a run on those whose targets are known."""
    run(data=data, data_dir=data_dir, model="mlp", sets=list(words))
    assert main_multi_gpu.run(["predict", "run", "--out", "said.csv", "--set", f"data.args.new={new}"]) == 0
    assert main_multi_gpu.run(["evaluate", "run", "--set", f"data.args.new={new}"]) == 2
    return rows("said.csv")


def test_rows_of_a_table_that_has_no_target_column(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["id,size,colour,kind", *(f"{at},{at % 7},{'ab'[at % 2]},{'xy'[at % 2]}" for at in range(60))]
    Path("known.csv").write_text("\n".join(lines))
    Path("new.csv").write_text("colour,size\nb,3\na,\nb,5\n")
    table = unknown("csv", "new.csv", "data.target=kind", "data.file=known.csv", "data.ignore=[id]")
    assert [list(row)[:2] for row in table] == [["sample", "prediction"]] * 3
    assert [row["prediction"] for row in table] == ["y", "x", "y"]
    assert "these samples have no targets" in capsys.readouterr().err
    words = ["predict", "run", "--out", "2.csv", "--set"]
    assert main_multi_gpu.run([*words, "data.args.test_file=new.csv"]) == 2
    assert "or data.new=new.csv, for rows without a target" in capsys.readouterr().err
    assert (
        main_multi_gpu.run([*words[:-1], "--data-dir", "new.csv", "--set", "data.ignore=[]", "--set", "data.file="])
        == 2
    )
    assert "--set data.new=FILE" in capsys.readouterr().err
    Path("new.csv").write_text("color,size\nb,3\n")
    assert main_multi_gpu.run([*words, "data.args.new=new.csv"]) == 2
    assert "there is no column 'colour'" in capsys.readouterr().err


def test_arrays_without_y() -> None:
    inputs = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.savez("data.npz", X=inputs, y=(inputs > 0).astype(int))
    np.savez("new.npz", X=inputs[:5])
    table = unknown("npz", "new.npz", "data.file=data.npz")
    assert [list(row) for row in table] == [["sample", *(f"probability {at}" for at in range(3))]] * 5


def test_a_folder_of_images_that_nobody_has_sorted() -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow (extra images)")
    for name, colour in {"photos/red": (200, 0, 0), "photos/blue": (0, 0, 200), "inbox": (190, 10, 10)}.items():
        Path(name).mkdir(parents=True)
        for at in range(10):
            image.new("RGB", (8 + at, 9), (*colour[:2], colour[2] + at)).save(f"{name}/{at}.png")
    table = unknown("image-folder", "../inbox", "data.size=8", "data.augment=false", data_dir="photos")
    assert [row["name"] for row in table] == [f"inbox/{at}.png" for at in range(10)]
    assert {row["prediction"] for row in table} == {"red"}


def test_a_dataset_of_ones_own_whose_test_part_has_inputs_alone(tmp_path: Path) -> None:
    Path("mine.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n\n"
        "def data(split):\n    inputs = torch.arange(60.0).view(20, 3)\n"
        "    return TensorDataset(inputs) if split == 'test' else TensorDataset(inputs, (inputs[:, 0] > 30).long())\n\n"
        "def labelled(split):\n    return data(split if split == 'train' else 'val')\n"
    )
    run(data="mine:labelled", model="mlp")
    words = ["predict", "run", "--own-code", "--data", "mine:data", "--out"]
    assert main_multi_gpu.run([*words, "one.csv"]) == 0
    outputs(2, [*words, "two.csv"], tmp_path)
    assert Path("two.csv").read_text() == Path("one.csv").read_text()
    assert [list(row) for row in rows("one.csv")] == [["sample", "prediction", "probability"]] * 20


def test_new_rows_by_other_arguments_of_the_same_factory(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n\n"
        "def rows(count, known=True):\n    inputs = torch.arange(3.0 * count).view(count, 3)\n"
        "    return TensorDataset(inputs, (inputs[:, 0] > 30).long()) if known else TensorDataset(inputs)\n"
    )
    run(data="rows:rows", model="mlp", sets=["data.count=30"])
    words = ["predict", "run", "--own-code", "--out", "said.csv", "--set"]
    assert main_multi_gpu.run([*words, "data.new={count: 4, known: false}"]) == 0
    assert [row["sample"] for row in rows("said.csv")] == ["0", "1", "2", "3"]
    assert "target" not in rows("said.csv")[0]
    Path("said.csv").unlink()
    assert main_multi_gpu.run([*words, "data.new=4"]) == 2
    assert "data.args.new: rows:rows has no new samples for 4" in capsys.readouterr().err


def test_labels_and_tokens_have_tables_too() -> None:
    inputs = np.random.default_rng(0).normal(size=(40, 3))
    np.savez("data.npz", X=inputs, y=(inputs > 0).astype(int))
    run(data="npz", data_dir=".", model="mlp")
    assert main_multi_gpu.run(["predict", "run", "--out", "labels.csv"]) == 0
    assert {"target 0", "probability 2"} <= set(rows("labels.csv")[0])
    tokens = np.arange(400).reshape(40, 10) % 7
    np.savez("data.npz", X=tokens, y=(tokens + 1) % 7)
    run_training(
        save_dir="lm", data="npz", data_dir=".", model="gpt", epochs=1, sets=["model.width=8", "model.heads=2"]
    )
    assert main_multi_gpu.run(["predict", "lm", "--out", "tokens.csv"]) == 0
    table = rows("tokens.csv")
    final = json.loads(Path("lm/summary.json").read_text())["final"]
    assert {row["tokens"] for row in table} == {"10"}
    assert np.mean([float(row["loss"]) for row in table]) == pytest.approx(final["test_loss"], rel=1e-6)


PICTURED = """
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from multigpu_cli.tasks.base import BatchMetrics, Task


def pictures(split):
    pixels = torch.rand(24, 1, 4, 6, generator=torch.Generator().manual_seed(len(split)))
    return TensorDataset(pixels, pixels)


def unknown():
    return torch.rand(3, 1, 4, 6, generator=torch.Generator().manual_seed(0))


class Copy(nn.Conv2d):
    def __init__(self):
        super().__init__(1, 1, 1)


class Returning(Copy):
    def forward(self, x, target=None):
        found = super().forward(x)
        return found, ((found - target) ** 2).mean()


class Squared(Task):
    def loss_sum(self, model, batch):
        return ((model(batch.inputs) - batch.targets) ** 2).flatten(1).mean(1).sum()

    def measure(self, model, batch):
        return BatchMetrics(self.loss_sum(model, batch).double(), torch.zeros(0, dtype=torch.int64))


class Named(Squared):
    def outputs(self, model, batch):
        found = model(batch.inputs)
        return {"mean": found.mean((1, 2, 3)), "mask": (found[:, 0] > 0.5).long(), "skipped": 7}


class Ragged(Squared):
    def outputs(self, model, batch):
        return model(batch.inputs)[:, :, : 1 + int(batch.sample_indices[0]) % 2]
"""


def train_pictures(task: str, model: str = "pictured:Copy") -> list[str]:
    Path("pictured.py").write_text(PICTURED)
    run(data="pictured:pictures", model=model, task=task)
    return ["predict", "run", "--own-code", "--batch-size", "5", "--out"]


def test_arrays_of_any_number_of_workers_hold_what_the_table_does(tmp_path: Path) -> None:
    run()
    words = ["predict", "run", "--own-code", "--out"]
    for name in ("one.csv", "one.npy", "one.npz"):
        assert main_multi_gpu.run([*words, name]) == 0
    outputs(2, [*words, "two.npz"], tmp_path)
    table, found = rows("one.csv"), np.load("one.npz")
    assert set(found) == {"prediction", "target"}
    assert found["prediction"].shape == (22, 3)
    assert found["prediction"].max(1) == pytest.approx([float(row["probability"]) for row in table])
    assert [str(number) for number in found["target"]] == [row["target"] for row in table]
    assert np.array_equal(np.load("one.npy"), found["prediction"])
    again = np.load("two.npz")
    assert {name: again[name].tobytes() for name in again} == {name: found[name].tobytes() for name in found}
    assert sorted(path.name for path in Path.cwd().glob(".*")) == [], "no half of a file is left"


@pytest.mark.parametrize("name", ["said.npz", "said"])
def test_predict_writes_nothing_through_planted_links(name: str) -> None:
    pytest.importorskip("PIL.Image", reason="needs Pillow (extra images)")
    words = train_pictures("pictured:Squared")
    Path("precious.txt").write_text("untouched")
    Path(f".{name}.unchecked").symlink_to("precious.txt")  # where the draft goes
    assert main_multi_gpu.run([*words, name]) == 0
    assert Path("precious.txt").read_text() == "untouched"
    assert not Path(name).is_symlink()
    assert not Path(f".{name}.unchecked").is_symlink()


def test_images_of_a_task_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow (extra images)")
    words = train_pictures("pictured:Squared")
    assert main_multi_gpu.run([*words, "all.npy"]) == 0
    Path(".said.unchecked").mkdir()  # of a predict that was killed
    assert main_multi_gpu.run([*words, "said"]) == 0
    assert "said  24 samples of the test split" in capsys.readouterr().out
    outputs(2, [*words, "two"], tmp_path)
    names = [f"{number:06d}.png" for number in range(24)]
    assert sorted(path.name for path in Path("said").iterdir()) == names
    assert [Path("two", name).read_bytes() for name in names] == [Path("said", name).read_bytes() for name in names]
    pixels = np.asarray(image.open("said/000007.png"))
    assert pixels.shape == (4, 6)
    assert np.array_equal(pixels, np.rint(np.load("all.npy")[7, 0].clip(0, 1) * 255))


def test_what_a_task_of_ones_own_says_are_its_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow (extra images)")
    words = train_pictures("pictured:Named")
    for name in ("said.csv", "said.npz", "said"):
        assert main_multi_gpu.run([*words, name]) == 0
    found = np.load("said.npz")
    assert {name: found[name].shape for name in found} == {"mean": (24,), "mask": (24, 4, 6), "target": (24, 1, 4, 6)}
    table = rows("said.csv")
    assert [float(row["mean"]) for row in table] == pytest.approx(found["mean"].tolist())
    assert [int(row["mask 23"]) for row in table] == found["mask"][:, 3, 5].tolist()
    assert np.array_equal(np.asarray(image.open("said/000003.png")), found["mask"][3])
    assert main_multi_gpu.run([*words, "said.npy"]) == 2
    assert "--out said.npy: there are mean, mask" in capsys.readouterr().err


def test_what_a_network_returns_beside_its_loss() -> None:
    words = train_pictures("from-model", "pictured:Returning")
    assert main_multi_gpu.run([*words, "said.npz"]) == 0
    assert np.load("said.npz")["output_0"].shape == (24, 1, 4, 6)


def test_outputs_that_do_not_fit_the_file_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = train_pictures("pictured:Ragged")
    assert main_multi_gpu.run([*words, "said.npy"]) == 2
    said = capsys.readouterr().err
    assert "--out said.npy: the outputs of samples differ in name or shape (Sizes of tensors must match" in said
    run_training(save_dir="flat", epochs=1)
    assert main_multi_gpu.run(["predict", "flat", "--own-code", "--out", "images"]) == 2
    assert "--out is a folder, for images, and the outputs are none: prediction float32" in capsys.readouterr().err
    assert not Path("images").exists()


def test_a_table_of_too_many_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("multigpu_cli.commands.predict.predict._MOST_COLUMNS", 40)
    words = train_pictures("pictured:Squared")
    assert main_multi_gpu.run([*words, "said.csv"]) == 2
    said = capsys.readouterr().err
    assert "a table with 48 numbers for each sample" in said
    assert "--out predictions.npz" in said


def test_new_rows_for_a_function_that_is_called_for_each_split(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*train_pictures("pictured:Squared")[:-1], "--set"]
    new = np.random.default_rng(0).random((3, 1, 4, 6), dtype=np.float32)
    np.savez("new.npz", X=new)
    np.save("new.npy", new)
    for at, value in enumerate(("new.npz", "new.npy", "pictured:unknown")):
        assert main_multi_gpu.run([*words, f"data.new={value}", "--out", f"{at}.npz"]) == 0, capsys.readouterr().err
        assert set(np.load(f"{at}.npz")) == {"prediction"}
    assert np.array_equal(np.load("0.npz")["prediction"], np.load("1.npz")["prediction"])
    assert np.load("2.npz")["prediction"].shape == (3, 1, 4, 6)
    np.savez("other.npz", Z=new)
    assert main_multi_gpu.run([*words, "data.new=other.npz", "--out", "no.npz"]) == 2
    assert "data.args.new: other.npz" in capsys.readouterr().err


def test_code_that_the_command_names_itself_needs_no_leave(capsys: pytest.CaptureFixture[str]) -> None:
    """As the refusal says."""
    train_pictures("pictured:Squared")
    named = ["--data", "pictured:pictures", "--model", "pictured:Copy", "--task", "pictured:Squared"]
    for command in (["evaluate", "run"], ["predict", "run", "--out", "a.npy"], ["export", "run", "--to", "a.pt2"]):
        assert main_multi_gpu.run(command) == 2
        assert "or name it in this command as well" in capsys.readouterr().err
        assert main_multi_gpu.run([*command, *named]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "said"), [("x.txt", "must end in .csv"), ("no/x.csv", "there is no folder no"), ("run.csv", "already")]
)
def test_a_place_that_will_not_do_is_named(out: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.csv").write_text("")
    assert main_multi_gpu.run(["predict", ".", "--out", out]) == 2
    assert said in capsys.readouterr().err
