import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import main_multi_gpu
from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from tests.support.run_training import run_training

HEAD = "id,size,colour,price,kind"


def write_table(folder: Path, count: int = 200, name: str = "table.csv", seed: int = 0) -> Path:
    """A table with gaps in numbers and categories; kind follows from size and colour, price from size."""
    draws, lines = random.Random(seed), [HEAD]
    for at in range(count):
        size, colour = draws.gauss(10, 3), draws.choice(["red", "green", '"deep, dark blue"'])
        kind = "big" if size + 3 * (colour == "red") > 11 else "small"
        cells = [str(at), f"{size:.3f}", colour, f"{1e5 + 2e4 * size:.0f}", kind]
        if at % 10 == 3:
            cells[1] = ["", "NA", "nan"][at % 3]
        if at % 17 == 5:
            cells[2] = "?"
        lines.append(",".join(cells))
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def open_table(folder: Path | None, **args: Any) -> DataSource:
    return load_data_source(DataConfig(name="csv", dir=str(folder) if folder else None, args=args), 42)


def tensors(split: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return split.tensors  # type: ignore[no-any-return]


def test_numbers_categories_and_gaps_become_columns(tmp_path: Path) -> None:
    source = open_table(write_table(tmp_path), target="kind", ignore=["id", "price"])
    inputs, targets = tensors(source.train)
    assert [len(part) for part in (source.train, source.val, source.test)] == [160, 20, 20]  # type: ignore[arg-type]
    assert (source.class_names, source.num_classes, source.task) == (("big", "small"), 2, "classification")
    assert source.input_shape == (1 + 1 + 4,), "size, whether it is missing, three colours and a missing one"
    assert inputs.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert torch.isfinite(inputs).all()
    assert inputs[:, 2:].sum(1).tolist() == [1.0] * 160


def test_scaling_is_learned_from_the_training_rows_alone(tmp_path: Path) -> None:
    source = open_table(write_table(tmp_path), target="kind", ignore=["id"])
    train, test = tensors(source.train)[0][:, :2], tensors(source.test)[0][:, :2]
    assert train.double().mean(0).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert train.double().std(0, correction=0).tolist() == pytest.approx([1, 1], rel=1e-5)
    assert test.double().mean(0).abs().max() > 1e-3
    far = (tmp_path / "table.csv").read_text().splitlines()
    changed = [line for line in far if ",big" in line][-1]
    (tmp_path / "other.csv").write_text(f"{HEAD}\n9,1e9,unheard of,1,big\n")
    other = open_table(tmp_path, target="kind", ignore=["id"], file="table.csv", test_file="other.csv")
    again = open_table(tmp_path, target="kind", ignore=["id"], file="table.csv", test_file="table.csv")
    assert torch.equal(tensors(other.train)[0], tensors(again.train)[0]), "what is tested on changes nothing"
    assert float(tensors(other.test)[0][0, 0]) > 1e6
    assert tensors(other.test)[0][0, 3:].sum() == 0, "a category that was not there is none of them"
    assert changed


def test_the_target_says_what_is_learned(tmp_path: Path) -> None:
    write_table(tmp_path)
    price = open_table(tmp_path, target="price", ignore="id")
    assert (price.task, price.num_classes, price.model) == ("regression", 0, "mlp")
    mean, deviation = price.target_scale or (0, 0)
    values = tensors(price.train)[1].double().numpy()
    assert (mean, deviation) == pytest.approx((np.mean(values), np.std(values)), rel=1e-5)
    assert open_table(tmp_path, target="id", kind="classification").num_classes == 200
    assert open_table(tmp_path, target="id").task == "regression"
    with pytest.raises(RequestError, match=r"data\.args\.kind: column 'kind' holds 'small', no number|'big'"):
        open_table(tmp_path, target="kind", kind="regression")


@pytest.mark.parametrize(("target", "best"), [("kind", "test_accuracy"), ("price", "test_mae")])
def test_it_trains_by_flags_alone(tmp_path: Path, target: str, best: str) -> None:
    flags: dict[str, Any] = {
        "data": "csv",
        "data_dir": str(write_table(tmp_path)),
        "save_dir": str(tmp_path / "run"),
        "num_workers": 0,
    }
    sets = [f"data.target={target}", f"data.ignore=[id{', price' if target == 'kind' else ', kind'}]"]
    ended = run_training(2, **flags, sets=[*sets, "model.args.dropout=0"], epochs=10, base_lr="3e-2")
    assert not ended.error
    final = ended.summary["final"]
    assert final["test_accuracy"] >= 0.8 if target == "kind" else final["test_mae"] < 20_000
    assert best in final


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_and_a_byte_order_mark(tmp_path: Path, separator: str) -> None:
    lines = [separator.join(("a", "b")), *(separator.join((str(at), str(at % 2))) for at in range(20))]
    (tmp_path / "table.csv").write_bytes("\ufeff".encode() + "\r\n".join(lines).encode())
    source = open_table(tmp_path, target="b")
    assert (source.input_shape, source.class_names) == ((1,), ("0", "1"))


def test_rows_without_a_target_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n" + "".join(f"{at},{at % 2 if at < 20 else 'NA'}\n" for at in range(30)))
    source = open_table(tmp_path, target="b")
    assert sum(len(part) for part in (source.train, source.val, source.test)) == 20  # type: ignore[misc, arg-type]


def test_what_makes_no_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="needs --data-dir"):
        open_table(None)
    write_table(tmp_path)
    with pytest.raises(RequestError, match="which column is the target") as refused:
        open_table(tmp_path)
    assert "--set data.target=kind" in refused.value.remedy
    with pytest.raises(RequestError, match="no column 'knid'") as refused:
        open_table(tmp_path, target="knid")
    assert "did you mean 'kind'?" in refused.value.remedy
    (tmp_path / "table.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(RequestError, match=r"table\.csv:3: 1 cells for 2 columns"):
        open_table(tmp_path, target="b")
    (tmp_path / "table.csv").write_text("a,a\n1,2\n")
    with pytest.raises(RequestError, match="two columns have the same name"):
        open_table(tmp_path, target="a")
    (tmp_path / "other.csv").write_text("")
    with pytest.raises(RequestError, match=r"must hold one \.csv file, and it holds other.csv, table.csv"):
        open_table(tmp_path, target="a")
    with pytest.raises(RequestError, match="no rows"):
        open_table(tmp_path, target="a", file="other.csv")
    with pytest.raises(RequestError, match=r"tabel\.csv: there is no such file"):
        open_table(tmp_path, target="a", file="tabel.csv")
    with pytest.raises(RequestError, match="has no column but the target, 'a', and ignored ones"):
        open_table(write(tmp_path / "other.csv", "a,b\n" + rows_of(9)), target="a", ignore="b")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def rows_of(count: int, line: str = "{at},{odd}") -> str:
    return "".join(line.format(at=at, odd=at % 2) + "\n" for at in range(count))


def test_columns_without_names_are_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", rows_of(40, "{at},x{odd},{odd}"))
    source = open_table(file, target=2, ignore=[0], header="none")
    assert (source.input_shape, source.class_names, source.warnings) == ((2,), ("0", "1"), ())
    assert sum(len(part) for part in (source.train, source.val, source.test)) == 40  # type: ignore[misc, arg-type]
    assert open_table(file, target=0, header="none", kind="regression").task == "regression"
    new = open_table(file, target=1, header="none", new=str(write(tmp_path / "new.csv", "7,1\n"))).new
    assert tensors(new)[0].shape == (1, 2), "without the column between"


def test_an_index_of_the_rows_is_left_out(tmp_path: Path) -> None:
    """As pandas (from 0) and R (from 1) write it: without a name; what merely looks like one is a feature."""
    for first in (0, 1):
        file = write(tmp_path / "t.csv", ",x,kind\n" + "".join(f"{at + first},{at % 7},{at % 2}\n" for at in range(40)))
        source = open_table(file, target="kind")
        assert (source.codec.columns, source.warnings) == (("x",), ())  # type: ignore[attr-defined]
        assert source.note == "without its unnamed first column, which counts the rows: "
    part = write(tmp_path / "part.csv", ",x,kind\n31,5,1\n32,6,0\n")
    assert tensors(open_table(file, target="kind", test_file=str(part)).test)[0].shape == (2, 1), "its rows go on"
    assert open_table(file, target="kind", ignore="").note == "", "left out by name, as the file has it"
    named = write(tmp_path / "named.csv", "n,x,kind\n" + rows_of(40, "{at},{at},{odd}"))
    assert open_table(named, target="kind").codec.columns == ("n", "x")  # type: ignore[attr-defined]
    alone = write(tmp_path / "alone.csv", ",kind\n" + rows_of(40))
    assert open_table(alone, target="kind").codec.columns == ("column_1",)  # type: ignore[attr-defined]


def test_other_columns_without_a_name_get_one(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", ",x,,column_3,kind\n" + rows_of(40, "{at}9,{odd},w{odd},7,{odd}"))
    source = open_table(file, target="kind")
    assert source.codec.columns == ("column_1", "x", "column_3_", "column_3")  # type: ignore[attr-defined]
    assert source.note == ""
    ignoring = open_table(file, target="kind", ignore=["", "x"])
    assert ignoring.codec.columns == ("column_3",)  # type: ignore[attr-defined]


def test_yes_and_no_name_columns_in_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", "x,no,on\n" + rows_of(40, "{at},{odd},{at}"))
    words = ["--data", "t.csv", "--dry-run", "--set"]
    for name in ("data.target=no", "data.ignore=[on]"):
        assert main_multi_gpu.run([*words, name]) == 2
        assert """which YAML reads as True and False: --set 'data.target="no"'""" in capsys.readouterr().err
    assert main_multi_gpu.run([*words, 'data.target="no"', "--set", 'data.ignore=["on"]']) == 0


def test_a_number_names_a_column_too(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", "x,2019\n" + rows_of(40))
    assert open_table(file, target=2019).class_names == ("0", "1")
    with pytest.raises(RequestError, match=r"data\.target: there is no column '2020'") as refused:
        open_table(file, target=2020)
    assert "one of: 2019, x" in refused.value.remedy
    with pytest.raises(RequestError, match=r"data\.ignore: there is no column '2020'"):
        open_table(file, target=2019, ignore=2020)
    file = write(tmp_path / "t.csv", rows_of(40, "5{at},w{at},{odd}"))
    with pytest.raises(RequestError, match="there is no column '2'") as refused:
        open_table(file, target=2)
    assert "--set data.header=none --set data.target=2" in refused.value.remedy
    assert "looks like data" in open_table(file, target="w0", kind="classification").warnings[0]


def test_labels_that_only_the_test_file_has_are_named(tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", "x,kind\n" + rows_of(40, "{at},k{odd}"))
    write(tmp_path / "test.csv", "x,kind\n1,k0\n\n2,K1\n3,k2\n4,k2\n")
    with pytest.raises(RequestError, match=r"test\.csv:4: labels that \S*train\.csv does not have: 'K1', 'k2'\n"):
        open_table(train, target="kind", test_file="test.csv")
    write(tmp_path / "test.csv", "x,kind\n1,\n")
    with pytest.raises(RequestError, match=r"data\.test_file: no row of \S*test\.csv has a target"):
        open_table(train, target="kind", test_file="test.csv")


def test_a_test_file_may_have_its_columns_in_another_order(tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", "a,b,kind\n" + rows_of(40, "{at},1{at},k{odd}"))
    write(tmp_path / "test.csv", "a,b,kind\n5,17,k1\n8,13,k0\n")
    write(tmp_path / "other.csv", "kind,b,a\nk1,17,5\nk0,13,8\n")
    same, other = (
        tensors(open_table(train, target="kind", test_file=f"{name}.csv").test) for name in ("test", "other")
    )
    assert [each.tolist() for each in other] == [each.tolist() for each in same]
    for head in ("kind,b,c", "kind,b"):
        write(tmp_path / "other.csv", f"{head}\n{head}\n")
        with pytest.raises(RequestError, match=r"data\.test_file: other\.csv has other columns"):
            open_table(train, target="kind", test_file="other.csv")


def test_a_test_file_does_not_decide_what_kind_of_target_it_is(tmp_path: Path) -> None:
    """Twenty whole numbers are classes; five more in the test file alone would make them numbers."""
    train = write(tmp_path / "train.csv", "x,kind\n" + "".join(f"{at},{at % 20}\n" for at in range(200)))
    write(tmp_path / "test.csv", "x,kind\n" + "".join(f"{at},{at}\n" for at in range(25)))
    with pytest.raises(RequestError, match=r"test\.csv:22: labels that \S*train\.csv does not have: '20', '21'"):
        open_table(train, target="kind", test_file="test.csv")


def test_one_label_written_in_two_ways_is_one_class(tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", "x,kind\n" + rows_of(40) + rows_of(40, "{at},{odd}.0"))
    write(tmp_path / "test.csv", "x,kind\n1,1.0\n2,0.0\n")
    source = open_table(train, target="kind", test_file="test.csv")
    assert source.class_names == ("0", "1")
    assert tensors(source.test)[1].tolist() == [1, 0]


def test_words_among_numbers_are_said_or_refused(tmp_path: Path) -> None:
    numbers = "x,y,kind\n" + rows_of(100, "{at},{at},{odd}")
    file = write(tmp_path / "t.csv", numbers + "12x,3,1\n")
    train = tensors(open_table(file, target="kind").train)[0]
    warnings = open_table(file, target="kind").warnings
    assert len(warnings) == 1
    assert f"{file}:102: '12x' in column 'x' is not a number" in warnings[0]
    counted = "it counts as missing" in warnings[0]
    assert counted == (train.shape[1] == 2), "whether it is a training row decides what becomes of its column"
    write(tmp_path / "test.csv", "x,y,kind\n1,1,1\n1,inf,0\n")
    write(tmp_path / "t.csv", numbers)
    for name in ("test_file", "new"):
        with pytest.raises(RequestError, match=r"test\.csv:3: 'inf' in column 'y' is not a number"):
            open_table(file, target="kind", **{name: "test.csv"})


def test_a_semicolon_file_with_decimal_commas_is_of_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", "x;price\n" + rows_of(40, "{at},5;1{at}00,25"))
    source = open_table(file, target="price")
    assert (source.task, source.input_shape) == ("regression", (1,))
    with pytest.raises(
        RequestError, match=r"t\.csv:2: '1000,25' in column 'price' is not a number, and 40 texts in 40"
    ):
        open_table(file, target="price", decimal="point")
    file.write_text(file.read_text() + "many;1,5\n")
    assert f"{file}:42: 'many' in column 'x' is not a number" in open_table(file, target="price").warnings[0]


def test_other_files_lie_beside_it_or_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_table(tmp_path)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    write(folder / "beside.csv", f"{HEAD}\n1,2,red,3,big\n")
    write(here / "own.csv", f"{HEAD}\n1,2,red,3,big\n1,2,red,3,small\n")
    for name, count in (("beside.csv", 1), ("own.csv", 2)):
        for place in (folder, folder / "table.csv"):
            found = open_table(place, target="kind", file="table.csv", test_file=name)
            assert len(tensors(found.test)[0]) == count


def test_the_user_hears_of_what_looks_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("iris.csv.gz").write_bytes(gzip.compress(rows_of(40, "{at},5.1,k{odd}").encode()))
    Path("test.csv").write_text("7,5.2,k3\n")
    words = ["--data", "iris.csv.gz", "--dry-run", "--set"]
    assert main_multi_gpu.run([*words, "data.target=k0"]) == 0
    assert "warning: iris.csv.gz: the first row looks like data (0, 5.1, k0)" in capsys.readouterr().out
    words += ["data.target=2", "--set", "data.header=none"]
    assert main_multi_gpu.run(words) == 0
    assert "warning" not in (said := capsys.readouterr().out)
    assert "mlp on csv (iris.csv.gz is a .csv.gz file: 32 training samples)" in said
    assert main_multi_gpu.run([*words, "--set", "data.test_file=test.csv"]) == 2
    assert "test.csv:1: labels that iris.csv.gz does not have: 'k3'" in capsys.readouterr().err


def test_words_that_training_does_not_know_are_counted(tmp_path: Path) -> None:
    """For every file but the training rows' own, and each column by itself."""
    file = write(tmp_path / "t.csv", "kind,size,y\n" + rows_of(60, "cat{odd},{at},{odd}"))
    new = write(tmp_path / "new.csv", "kind,size\ncat1,1\nzebra,2\n,3\ncat0,4\n")
    warning = f"{new}:3: 'zebra' in column 'kind' is in no training row and counts as no known word; so in 2 of 4 rows"
    assert open_table(file, target="y", new=str(new)).warnings == (warning,)
    write(new, "kind,size\ncat1,1\ncat0,2\n")
    assert not open_table(file, target="y", new=str(new)).warnings


@pytest.mark.parametrize("cell", ["{} kg", "{}k", "{}.5 cm²", "€{}M"])
def test_numbers_with_units_that_become_words_are_told(tmp_path: Path, cell: str) -> None:
    file = write(tmp_path / "t.csv", "weight,y\n" + rows_of(90, cell.replace("{}", "{at}") + ",{odd}"))
    (warning,) = open_table(file, target="y").warnings
    assert "in column 'weight' is not a number, so the whole column is read as words" in warning


def test_large_whole_numbers_are_no_class_each(tmp_path: Path) -> None:
    """Floats are the same for many of them; with data.kind they stay classes."""
    lines = "".join(f"{at},{1_700_000_000_000_000_000 + 7 * at}\n" for at in range(300))
    file = write(tmp_path / "t.csv", "a,y\n" + lines)
    with pytest.raises(RequestError, match=r"column 'y': numbers such as .* are rounded by"):
        open_table(file, target="y")
    assert open_table(file, target="y", kind="classification").num_classes == 300


@pytest.mark.parametrize("form", ["${}", "{}%", "{} €", "{},000", "2024-01-{:02}"])
def test_few_amounts_and_dates_are_numbers_not_classes(tmp_path: Path, form: str) -> None:
    lines = "".join(f'{at},"{form.format(at % 7 + 1)}"\n' for at in range(300))
    file = write(tmp_path / "t.csv", "a,y\n" + lines)
    assert open_table(file, target="y").task == "regression"
    assert open_table(file, target="y", kind="classification").num_classes == 7


@pytest.mark.parametrize("odd", ["unknown", "1k"])
def test_target_of_mostly_numbers_is_told_if_words_make_it_classes(tmp_path: Path, odd: str) -> None:
    lines = "".join(f"{at % 7},{odd if at % 4 == 0 else at % 31}\n" for at in range(400))
    file = write(tmp_path / "t.csv", "a,y\n" + lines)
    (warning,) = open_table(file, target="y").warnings
    assert f"{odd!r} in column 'y' is not a number, so the whole column is read as words" in warning
