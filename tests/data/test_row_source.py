"""Rows on a disk as samples: the same from Arrow, JSON lines and .tar."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.loader import Loader
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import plan_batches
from tests.support.image_files import make_png
from tests.support.row_files import ROWS, encode_image, make_samples, write_arrow, write_jsonl, write_tar


def load(name: str, place: Path, **args: Any) -> Any:
    return load_data_source(DataConfig(name=name, dir=str(place), args=args), 42)


def read_all(source: Any) -> None:
    for at in range(len(source.train)):
        source.train[at]


def open_all(folder: Path) -> dict[str, Any]:
    numbers = {"target": "label", "ignore": ["kind"]}
    return {
        "arrow": load("arrow", write_arrow(folder / "arrow"), **numbers),
        "jsonl": load("jsonl", write_jsonl(folder / "rows.jsonl"), **numbers),
        "tar": load("tar", write_tar(folder / "tar", make_samples()), columns=["json.a", "json.b"]),
    }


def test_the_same_rows_are_the_same_samples_in_every_format(tmp_path: Path) -> None:
    sources = open_all(tmp_path)
    whole = {}
    for name, source in sources.items():
        assert (source.num_classes, source.input_shape, source.task) == (2, (2,), "classification"), name
        splits = [source.train, source.val, source.test]
        assert [len(split) for split in splits] == [48, 6, 6]
        found = [split[at] for split in splits for at in range(len(split))]
        whole[name] = [(*inputs.tolist(), int(target)) for inputs, target in found]
        assert sorted(whole[name]) == sorted((row["a"], row["b"], row["label"]) for row in ROWS), name
        again = copy.deepcopy(source.train)  # as pickle does it for a spawned loader process
        assert torch.equal(again[5][0], source.train[5][0])
        assert source.prepare == sources["arrow"].prepare
    assert whole["arrow"] == whole["jsonl"] == whole["tar"]


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_are_those_of_the_samples(tmp_path: Path, processes: int) -> None:
    source = load("arrow", write_arrow(tmp_path), target="label", ignore="kind")
    config, plan = DataConfig(num_workers=processes), plan_batches(samples=48, micro_batch=8, workers=1)
    loader = Loader(source.train, source, config, device=torch.device("cpu"), seed=1)
    batches = [batch for _, work in loader.epoch(plan, 0, 0, 0, 1) for batch in work]
    loader.close()
    assert torch.cat([batch.sample_indices for batch in batches]).tolist() == loader.sample_order(0)[:].tolist()
    for batch in batches:
        for number, (index, row) in enumerate(zip(batch.sample_indices.tolist(), batch.inputs, strict=True)):
            inputs, target = source.train[index]
            assert torch.equal(source.prepare(inputs[None])[0], row)
            assert batch.targets[number] == target


@pytest.mark.parametrize("start", [0, 5])
def test_a_batch_begins_where_any_tensor_does_whatever_was_fetched_with_it(tmp_path: Path, start: int) -> None:
    source = load("arrow", write_arrow(tmp_path), target="label", ignore="kind")
    plan = plan_batches(samples=48, micro_batch=3, workers=1)
    loader = Loader(source.train, source, DataConfig(num_workers=0), device=torch.device("cpu"), seed=1)
    chunks = [loader.sample_order(0)[first : first + 3] for first in range(3 * start, 48, 3)]
    fetched = list(loader._fetch.stream(chunks, 0))
    assert len(fetched) == plan.steps_per_epoch - start
    for chunk, batch in zip(chunks, fetched, strict=True):
        assert batch.indices.tolist() == chunk.tolist()
        for index, row in zip(chunk.tolist(), batch.inputs, strict=True):
            assert torch.equal(source.train[index][0], row)
        assert batch.inputs.data_ptr() % 64 == batch.targets.data_ptr() % 64 == 0


def test_a_class_number_beyond_the_classes_is_named(tmp_path: Path) -> None:
    rows = [{**row, "label": 5 if row["a"] == 0.5 else row["label"]} for row in ROWS]
    source = load("arrow", write_arrow(tmp_path, rows), target="label", ignore="kind", classes=2)
    loader = Loader(source.train, source, DataConfig(num_workers=0), device=torch.device("cpu"), seed=1)
    with pytest.raises(RequestError, match="has the label 5, and there are 2 classes"):
        list(loader.iter_training_batches([torch.arange(48)], 0))


def test_blocks_of_the_order_come_from_the_setting(tmp_path: Path) -> None:
    source = load("arrow", write_arrow(tmp_path), target="label", ignore="kind")
    config = DataConfig(shuffle_block=4, shuffle_window=2, num_workers=0)
    loader = Loader(source.train, source, config, device=torch.device("cpu"), seed=1)
    order = loader.sample_order(0)[:]
    assert order.sort().values.tolist() == list(range(48))
    assert len(set((order[:8] // 4).tolist())) == 2


def test_words_and_many_numbers(tmp_path: Path) -> None:
    place = write_arrow(tmp_path)
    words = load("arrow", place, target="kind", ignore="label")
    assert words.class_names == ("cat", "dog")
    assert {int(words.train[at][1]) for at in range(48)} == {0, 1}
    numbers = load("arrow", place, target="a", columns=["b"])
    assert numbers.task == "regression"
    assert numbers.target_scale is not None


NOTATIONS = {"1,230.50": 1230.5, "$57": 57.0, "2024-01-05": 19727.0, "0.25": 0.25}


def open_texts(folder: Path, texts: list[str], **args: Any) -> dict[str, Any]:
    """Sources of 60 rows whose target is a text, in every format."""
    rows = [{**row, "kind": texts[at % len(texts)]} for at, row in enumerate(ROWS)]
    args |= {"ignore": "label"}
    sources = {
        "arrow": load("arrow", write_arrow(folder / "arrow", rows), target="kind", **args),
        "jsonl": load("jsonl", write_jsonl(folder / "rows.jsonl", rows), target="kind", **args),
    }
    if not args.get("kind"):  # without a list of classes, a .tar has none but in .cls
        columns = {"target": "json.kind", "columns": ["json.a", "json.b"]}
        sources["tar"] = load("tar", write_tar(folder / "tar", make_samples(rows)), **columns)
    return sources


@pytest.mark.parametrize("text", NOTATIONS)
def test_texts_of_amounts_or_dates_are_numbers(tmp_path: Path, text: str) -> None:
    for source in open_texts(tmp_path, [text]).values():
        assert (source.task, source.num_classes, source.class_names) == ("regression", 0, ())
        assert source.train[3][1].tolist() == pytest.approx(NOTATIONS[text])
        assert source.target_scale == pytest.approx((NOTATIONS[text], 1.0))
    if text != "0.25":
        assert open_texts(tmp_path, [text, "$1"], kind="classification")["arrow"].class_names == tuple(
            sorted([text, "$1"])
        )


def test_texts_of_whole_numbers_stay_labels(tmp_path: Path) -> None:
    labels = {"007", "11", "3"}
    rows = [{"a": row["a"], "label": sorted(labels)[at % 3]} for at, row in enumerate(ROWS)]
    source = load("jsonl", write_jsonl(tmp_path / "rows.jsonl", rows))
    assert (set(source.class_names), source.warnings) == (labels, ())


def test_row_with_another_notation_is_named(tmp_path: Path) -> None:
    rows = [{"a": row["a"], "label": f"${at}"} for at, row in enumerate(ROWS)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "test.jsonl", [*rows[:20], {"a": 1.0, "label": "call us"}])
    with pytest.raises(RequestError, match=r"test\.jsonl: row 20, from 0, has 'call us' in column 'label'"):
        load("jsonl", tmp_path)


def test_uncertain_separator_of_texts_has_its_setting(tmp_path: Path) -> None:
    for source in open_texts(tmp_path, ["1,234", "999"]).values():
        assert "is read as 1234; --set data.decimal=comma if it is 1.234" in source.warnings[0]
    rows = write_jsonl(tmp_path / "b.jsonl", [{"a": row["a"], "label": "1,234"} for row in ROWS])
    source = load("jsonl", rows, decimal="comma")
    assert (source.train[0][1].item(), source.warnings) == (pytest.approx(1.234), ())


@pytest.mark.parametrize("text", ["EUR {}.50", "{} years", "{}.5°C", "{}"])
def test_class_per_text_with_a_number_is_warned_of(tmp_path: Path, text: str) -> None:
    rows = [{"a": row["a"], "label": text.format(at % 30)} for at, row in enumerate(ROWS)]
    place = write_jsonl(tmp_path / "rows.jsonl", rows)
    (warning,) = load("jsonl", place).warnings
    assert f"rows.jsonl: column 'label': 30 different texts such as '{text.format(0)}' are 30 classes" in warning
    assert "--set data.kind=classification" in warning
    assert load("jsonl", place, kind="classification").warnings == ()


def test_arrays_images_and_tokens(tmp_path: Path) -> None:
    rows = [{"x": [[n, 1], [2, 3]], "label": n % 2, "pic": encode_image(n), "on": n % 3 == 0} for n in range(20)]
    place = write_arrow(tmp_path / "wide", rows)
    arrays = load("arrow", place, columns=["x"])
    assert arrays.input_shape == (2, 2)
    images = load("arrow", place, columns="pic", size=8, resize=8, augment=False)
    assert (images.input_shape, images.model) == ((3, 8, 8), "resnet18")
    inputs, target = images.train[0]
    assert inputs.shape == (3, 8, 8)
    assert int(inputs[0, 0, 0]) % 2 == int(target), "the picture of its row"
    assert load("arrow", place, columns=["on"]).train[0][0].tolist() == [1.0]
    tokens = load(
        "arrow", write_arrow(tmp_path / "tokens", [{"input_ids": [n, 1, 2]} for n in range(20)]), vocabulary=50
    )
    first, following = tokens.train[0]
    assert following.tolist() == [*first.tolist()[1:], -100]
    assert (tokens.model, tokens.num_classes) == ("gpt", 50)


def test_shards_of_images(tmp_path: Path) -> None:
    samples = [{"png": encode_image(10 * n), "cls": str(n % 3).encode(), "txt": b"x"} for n in range(20)]
    source = load("tar", write_tar(tmp_path, samples), size=8, resize=8, augment=False)
    assert (source.num_classes, len(source.train), source.task) == (3, 16, "classification")
    for at in range(16):
        inputs, target = source.train[at]
        assert int(inputs[0, 0, 0]) // 10 % 3 == int(target)


def test_images_of_16_bits_keep_their_values_in_rows(tmp_path: Path) -> None:
    pictures = [make_png(np.full((8, 9), 3000 * n, "uint16")) for n in range(20)]
    arrow = write_arrow(tmp_path / "arrow", [{"pic": each, "label": n % 2} for n, each in enumerate(pictures)])
    tar = write_tar(tmp_path / "tar", [{"png": each, "cls": b"%d" % (n % 2)} for n, each in enumerate(pictures)])
    for name, place in (("arrow", arrow), ("tar", tar)):
        source = load(name, place, size=8, resize=8, augment=False)
        shades = {
            int(split[at][0].max()) for split in (source.train, source.val, source.test) for at in range(len(split))
        }
        assert shades == {3000 * n >> 8 for n in range(20)}, name


@pytest.mark.parametrize(
    ("rows", "args", "message"),
    [
        (ROWS, {}, "holds string"),
        (ROWS, {"target": "labl"}, "has no column 'labl'"),
        (ROWS, {"target": "kind", "kind": "regression"}, "has 'cat' in column 'kind', which is not a number"),
        (ROWS, {"columns": ["a", "kind"]}, "holds string, neither numbers"),
        (ROWS[:9], {"ignore": "kind"}, "9 rows can't be divided"),
        ([{**row, "a": None if row["a"] == 2 else row["a"]} for row in ROWS], {"ignore": "kind"}, "1 rows without"),
        ([{"x": [1, 2], "label": 0}] * 12 + [{"x": [1], "label": 1}], {}, "holds 1 numbers in one row"),
        ([{"x": [1, 2], "label": 0}] * 12 + [{"x": [1, 2, 3], "label": 1}], {}, "holds 3 numbers in one row"),
        ([{"x": [1, 2], "y2": 3.0, "label": 0}] * 12, {}, "can't be combined"),
        ([{"input_ids": [1, 2]}] * 12, {}, "tokens, and the size"),
        ([{"input_ids": [1, 9]}] * 12, {"vocabulary": 5}, "token 9 is beyond"),
        ([{"x": 1.0, "z": 1}] * 12, {}, "which column is the target"),
        (ROWS, {"ignore": "kind", "classes": [0]}, "has the label 1"),
    ],
)
def test_what_makes_no_samples_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], args: dict[str, Any], message: str
) -> None:
    place = write_arrow(tmp_path, rows)
    with pytest.raises(RequestError, match=message):
        read_all(load("arrow", place, **args))


def test_parts_of_their_own(tmp_path: Path) -> None:
    for part, first in (("train", 0), ("validation", 30), ("test", 50)):
        write_arrow(tmp_path / part, ROWS[first : first + 10 + (not first) * 20])
    source = load("arrow", tmp_path, target="label", ignore="kind")
    assert [len(split) for split in (source.train, source.val, source.test)] == [30, 10, 10]
    assert source.val[0][0].tolist() == [ROWS[30]["a"], ROWS[30]["b"]]
    write_arrow(tmp_path / "test", [{"a": 1.0, "label": 1}] * 3)
    with pytest.raises(RequestError, match="column 'b' differs between"):
        load("arrow", tmp_path, target="label", ignore="kind")


def test_many_rows_are_shuffled_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigpu_cli.data.rows.source.LARGE", 40)
    assert load("arrow", write_arrow(tmp_path), target="label", ignore="kind").shuffle_block == 4096


def test_numbers_of_all_types(tmp_path: Path) -> None:
    types: dict[str, Any] = {"a": "float16", "b": "uint8", "label": "int8"}
    source = load("arrow", write_arrow(tmp_path, **types), target="label", ignore="kind")
    inputs, target = source.train[3]
    assert inputs.dtype == torch.float32
    assert target.dtype == torch.int64
    assert np.isclose(inputs.tolist(), source.train.store.read("a", source.train.selection.find_rows([3]))[0]).any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "place"), [("arrow", "row 18, from 0,"), ("jsonl", r"rows\.jsonl:25")])
def test_nan_and_infinity_are_refused_with_row_and_column(tmp_path: Path, name: str, place: str, value: float) -> None:
    rows = [{"a": float(number), "b": 1.0, "label": number % 2} for number in range(60)]
    rows[18]["a"] = value
    path = write_arrow(tmp_path / "arrow", rows) if name == "arrow" else write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(RequestError, match=place) as refused:
        load(name, path, target="label")
    assert "column 'a'" in str(refused.value)
    assert load(name, path, target="label", ignore="a").input_shape == (1,)
    with pytest.raises(RequestError, match="column 'a'"):
        load(name, path, target="a", columns=["b"])


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Arrow files and shards of three parts, the later with NaN in row 25, which is not looked at before a training."""
    monkeypatch.setattr("multigpu_cli.data.rows.source._SCALED_BY", 2)  # the first and the last row
    for part in ("train", "validation", "test"):
        value = {"train": 0.0, "validation": math.nan, "test": -math.inf}[part]
        rows = [{**row, "a": value if number == 25 else row["a"]} for number, row in enumerate(ROWS)]
        write_arrow(tmp_path / "arrow" / part, rows)
        write_tar(tmp_path / "tar" / part, make_samples(rows))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "column", "args"),
    [
        ("arrow", "a", {"columns": ["b", "a"], "target": "label"}),
        ("arrow", "a", {"columns": ["b"], "target": "a"}),
        ("tar", "json.a", {"columns": ["json.a", "json.b"]}),
        ("tar", "npy", {"columns": ["npy"]}),
    ],
)
def test_rows_refuse_nan_in_any_batch(parts: Path, name: str, column: str, args: dict[str, Any]) -> None:
    source = load(name, parts / name, **args)
    for split, part in ((source.val, "validation"), (source.test, "test")):
        source.train.fetch_batch(np.arange(60))
        split.fetch_batch(np.arange(25))
        with pytest.raises(RequestError, match=rf"{part}.*: row 25, from 0, has NaN or infinity in column") as refused:
            split.fetch_batch(np.arange(20, 60))
        assert repr(column) in str(refused.value)
        assert f"data.ignore={column}" in refused.value.remedy


def test_loader_process_names_the_row_with_nan(parts: Path) -> None:
    source = load("arrow", parts / "arrow", columns=["a"], target="label")
    loader = Loader(source.val, source, DataConfig(num_workers=1), device=torch.device("cpu"), seed=1)
    with pytest.raises(RequestError, match="row 25, from 0, has NaN"):
        list(loader.iter_training_batches([torch.arange(60)], 0))
    loader.close()


@pytest.mark.parametrize("name", ["arrow", "tar"])
def test_nan_in_few_validation_rows_is_refused_before_training(
    parts: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("multigpu_cli.data.rows.source._SCALED_BY", 60)
    with pytest.raises(RequestError, match=r"validation.*: row 25, from 0, has NaN"):
        load(name, parts / name, columns=["a" if name == "arrow" else "json.a"])


def test_image_rows_refuse_a_target_of_nan(tmp_path: Path) -> None:
    rows = [{"pic": encode_image(n), "label": math.nan if n == 19 else float(n)} for n in range(20)]
    for part in ("train", "test"):
        write_arrow(tmp_path / part, rows)
    source = load("arrow", tmp_path, columns="pic", size=8, resize=8)
    with pytest.raises(RequestError, match=r"test.*: row 19, from 0, has NaN or infinity in column 'label'"):
        source.test[19]


@pytest.mark.parametrize("name", ["arrow", "jsonl"])
@pytest.mark.parametrize("column", ["seconds", "label"])
def test_numbers_that_float32_would_round_are_refused(tmp_path: Path, name: str, column: str) -> None:
    rows = [{"a": number / 3, "seconds": number % 9, "label": float(number)} for number in range(60)]
    path = tmp_path / "rows.jsonl" if name == "jsonl" else tmp_path / "arrow"
    write = write_jsonl if name == "jsonl" else write_arrow
    load(name, write(path, rows), target="label", kind="regression")
    for row in rows:
        row[column] += 1.7e9
    with pytest.raises(RequestError, match=f"column {column!r}: numbers such as .* are rounded by .* in float32"):
        load(name, write(path, rows), target="label", kind="regression")
