"""Which texts of a table are numbers, which are labels or codes, and which say that nothing is there."""

import csv
import io
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.notation import PLAIN, is_missing, to_number
from multigpu_cli.data.source import DataSource
from multigpu_cli.data.tables.csv import CsvFormat, CsvTable, read_csv, read_decimal_commas
from multigpu_cli.errors import RequestError

CODES = st.text("01_\u0667\uff11.+-e aN?", min_size=1, max_size=4).map(str.strip).filter(bool)
GAPS = ["None", "NA", "null", "nan", "?", "-", "n/a"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables") / "t.csv"


def write(path: Path, columns: Mapping[str, Any], separator: str = ",") -> Path:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, lineterminator="\n")
    writer.writerows([list(columns), *zip(*columns.values(), strict=True)])
    path.write_text(text.getvalue())
    return path


def open_table(path: Path, target: str = "y", **args: Any) -> DataSource:
    return load_data_source(DataConfig(name="csv", dir=str(path), args={"target": target, **args}), 42)


def count_rows(source: DataSource) -> int:
    return sum(len(part) for part in (source.train, source.val, source.test))  # type: ignore[misc, arg-type]


def read_numbers(path: Path, columns: Mapping[str, Any], separator: str = ",", **form: str) -> CsvTable:
    table = read_csv(write(path, columns, separator), CsvFormat(**form))
    read_decimal_commas(table, {})
    return table


@given(st.lists(CODES, min_size=2, max_size=8, unique=True))
def test_labels_are_one_class_only_as_1_and_1_0_are(file: Path, labels: list[str]) -> None:
    wholes = [re.fullmatch(r"(0|-?[1-9][0-9]*)(\.0*)?", label, re.ASCII) for label in labels]
    classes = {match[1] for match in wholes if match} if all(wholes) else set(labels)
    assume(len(classes) > 1)
    source = open_table(
        write(file, {"x": range(10 * len(labels)), "y": labels * 10}), kind="classification", header="first"
    )
    assert (source.num_classes, count_rows(source)) == (len(classes), 10 * len(labels))


@given(st.lists(st.sampled_from(["a", "b", "", *GAPS]), min_size=20, max_size=60))
def test_rows_with_a_label_are_never_left_out(file: Path, labels: list[str]) -> None:
    labels += ["a", "b"] * 5
    source = open_table(write(file, {"x": range(len(labels)), "y": labels}))
    empty = labels.count("")
    assert count_rows(source) == len(labels) - empty
    assert set(source.class_names) == {*labels} - {""}
    assert (f"without {empty} of {len(labels)} rows of t.csv" in source.note) == bool(empty)
    assert all(f"{word!r} ({labels.count(word)} rows)" in str(source.warnings) for word in {*labels} & {*GAPS})


@given(st.lists(st.sampled_from(["", *GAPS]), max_size=20), st.sampled_from([0.5, 1]))
def test_words_for_nothing_among_numbers_are_counted(file: Path, gaps: list[str], step: float) -> None:
    targets = [*(number * step for number in range(30)), *gaps]
    source = open_table(write(file, {"x": range(len(targets)), "y": targets}))
    assert (source.task, count_rows(source)) == ("regression", 30)
    words = [word for word in gaps if word]
    assert bool(words) == ("is no target, as the others are numbers" in str(source.warnings))
    assert all(f"{word!r} ({words.count(word)} rows)" in str(source.warnings) for word in words)
    assert (f"without {len(gaps)} of {len(targets)} rows" in source.note) == bool(gaps)
    if len(set(words)) > 1:
        labels = open_table(file, kind="classification")
        assert set(words) < set(labels.class_names)


@given(
    st.lists(st.integers(-(10**11), 10**11), min_size=1),
    st.sampled_from([",.", ".,", "'.", "\u2019.", " ,", "\u202f,", "\u00a0."]),
    st.sampled_from(["{}", "{}%", "{} %", "${}", "{} €", "£ {}"]),
    st.sampled_from([",", ";", "\t"]),
)
def test_grouped_numbers_with_units_are_read_equal(
    file: Path, cents: list[int], signs: str, unit: str, separator: str
) -> None:
    cents += [123_456_789, -123_456]
    signed = str.maketrans({",": signs[0], ".": signs[1]})
    cells = [unit.format(f"{number / 100:,.2f}".translate(signed)) for number in cents]
    table = read_numbers(file, {"x": cells, "y": range(len(cells))}, separator)
    numbers, is_word = table.parse("x")
    assert numbers.tolist() == [number / 100 for number in cents]
    assert not is_word.any()
    assert not table.doubts


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_that_python_writes_are_read_equal(file: Path, numbers: list[float]) -> None:
    table = read_numbers(file, {"x": numbers, "y": numbers})
    assert table.parse("x")[0].tolist() == numbers
    assert table.notations["x"] == PLAIN


@given(st.lists(st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)), min_size=1))
def test_iso_dates_are_days_since_1970(file: Path, moments: list[datetime]) -> None:
    days = [
        (moment.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86_400 for moment in moments
    ]
    columns = {
        "moment": [moment.isoformat(" ", "microseconds") for moment in moments],
        "day": [f"{moment:%Y-%m-%d}" if moment.year > 999 else moment.date().isoformat() for moment in moments],
    }
    table = read_numbers(file, columns)
    assert table.parse("moment")[0].tolist() == pytest.approx(days, abs=1e-9)
    assert table.parse("day")[0].tolist() == [day // 1 for day in days]


@given(st.text(max_size=6))
def test_plain_numbers_are_ascii_without_leading_zeros(cell: str) -> None:
    number = to_number(cell)
    pattern = r"[+-]?(?!0[0-9])([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
    assert (number is not None) == bool(re.fullmatch(pattern, cell.strip(" \t\n\r\f\v"), re.ASCII)) or number is None


@pytest.mark.parametrize("codes", [["1_1", "11", "1_12", "112"], ["007", "7", "0070", "70"], ["1", "\uff11", "\u0661"]])
def test_input_codes_that_float_merges_stay_apart(file: Path, codes: list[str]) -> None:
    source = open_table(write(file, {"x": codes * 20, "y": [0, 1] * 10 * len(codes)}))
    assert source.input_shape == (len(codes),)


def test_words_for_nothing_among_input_numbers_are_counted_by_the_plan(file: Path) -> None:
    ages = [*range(35), "NA", "NA", "?", "", ""]
    source = open_table(write(file, {"age": ages, "y": [0, 1] * 20}))
    assert source.note == "read as missing: 'NA' in age (2), '?' in age (1): "
    assert source.input_shape == (2,), "the number, and whether it is missing"
    assert all(map(is_missing, GAPS))


@pytest.mark.parametrize(
    ("cells", "separator", "value", "setting", "other"),
    [
        (["1,234", "999"], ",", 1234, "comma", 1.234),
        (["1,234", "999"], "\t", 1.234, "point", 1234),
        (["1.234", "999"], ";", 1.234, "comma", 1234),
        (["1.234 €", "999 €"], ",", 1.234, "comma", 1234),
    ],
)
def test_an_uncertain_separator_is_warned_of_with_its_setting(
    file: Path, cells: list[str], separator: str, value: float, setting: str, other: float
) -> None:
    columns = {"x": cells * 20, "y": [0, 1] * 20}
    table = read_numbers(file, columns, separator)
    assert table.parse("x")[0][:2].tolist() == [value, 999]
    assert f"is read as {value}; --set data.decimal={setting} if it is {other}" in table.doubts["x"]
    assert table.doubts["x"] in open_table(file).warnings
    certain = read_numbers(file, columns, separator, decimal=setting)
    assert certain.parse("x")[0][:2].tolist() == [other, 999]
    assert not certain.doubts


@pytest.mark.parametrize(
    ("cells", "odd"),
    [
        ([f"{day}.12.2024" for day in range(1, 26)] * 3, "'1.12.2024'"),
        ([*(f"${price}" for price in range(40)), *(f"€{price}" for price in range(40))], "'[$]0'"),
        ([f"{code:05}" for code in range(0, 80_000, 1000)], "'00000'"),
    ],
)
def test_unread_numbers_are_warned_of_and_refused_as_targets(file: Path, cells: list[str], odd: str) -> None:
    columns = {"x": cells, "y": [at % 2 for at in range(len(cells))]}
    expected = rf"{odd} in column 'x' is not a number, so the whole column is read as words; write numbers as 1234\.5"
    assert re.search(expected, str(open_table(write(file, columns)).warnings).replace('"', "'"))
    if len(set(cells)) > len(cells) / 2:
        with pytest.raises(RequestError, match=r"data\.target: .* is not a number, and .* rows are no classes"):
            open_table(file, target="x")
        assert open_table(file, target="x", kind="classification").num_classes == len(set(cells))


@pytest.mark.parametrize("text", ["EUR {}.50", "{} years", "{}.5°C", "room {}"])
def test_class_per_text_with_a_number_is_warned_of(file: Path, text: str) -> None:
    write(file, {"x": range(90), "y": [text.format(at % 30) for at in range(90)]})
    (warning,) = open_table(file).warnings
    assert "column 'y': " in warning
    assert "30 different texts such as" in warning or "is not a number" in warning
    assert open_table(file, kind="classification").warnings == ()


@pytest.mark.parametrize(("text", "count"), [("class {}", 20), ("grade {}", 3), ("room {}", 30), ("wnid{:08}", 40)])
def test_labels_with_numbers_are_not_warned_of(file: Path, text: str, count: int) -> None:
    source = open_table(write(file, {"x": range(400), "y": [text.format(at % count) for at in range(400)]}))
    assert (source.num_classes, source.warnings) == (count, ())


def test_texts_with_a_fraction_are_warned_of_in_many_rows(file: Path) -> None:
    write(file, {"x": range(4000), "y": [f"EUR {at % 25}.50" for at in range(4000)]})
    assert "25 different texts such as 'EUR 0.50'" in str(open_table(file).warnings)


def test_amounts_without_their_sign_are_read(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", {"p": [f"${at}.12" for at in range(60)], "y": [f"$1,{at:03}.50" for at in range(60)]})
    write(tmp_path / "test.csv", {"p": ["7.12", "8.12"], "y": ["1,007.50", "1008.50"]})
    source = open_table(tmp_path / "t.csv", test_file="test.csv")
    assert source.test.tensors[1].tolist() == [1007.5, 1008.5]  # type: ignore[union-attr]
    write(tmp_path / "t.csv", {"p": [f"{at} %" for at in range(60)], "y": [f"${at}.5" for at in range(60)]})
    write(tmp_path / "test.csv", {"p": ["0.07"], "y": ["$3.5"]})
    with pytest.raises(RequestError, match=r"test\.csv:2: '0\.07' in column 'p' is not a number.*such as '[0-9]+ %'"):
        open_table(tmp_path / "t.csv", test_file="test.csv")


def test_unread_target_of_another_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", {"x": range(60), "y": [f"${at}.5" for at in range(60)]})
    write(tmp_path / "test.csv", {"x": [1, 2], "y": ["$3.5", "4 EUR"]})
    with pytest.raises(
        RequestError, match=r"test\.csv:3: '4 EUR' in column 'y' is not a number.*such as '\$0\.5'"
    ) as said:
        open_table(tmp_path / "t.csv", test_file="test.csv")
    assert "classification" not in said.value.remedy


@pytest.mark.parametrize("name", ["images\\{}.png", "/elsewhere/{}.JPG", "clips/{}.wav"])
@pytest.mark.parametrize("gaps", [0, 5])
def test_names_of_images_or_sounds_are_refused(tmp_path: Path, name: str, gaps: int) -> None:
    files = [*["?"] * gaps, "a note", *map(name.format, range(39 - gaps))]
    write(tmp_path / "t.csv", {"file": files, "x": range(40), "y": [0, 1] * 20})
    with pytest.raises(RequestError, match=r"column 'file' of .*t\.csv names files"):
        open_table(tmp_path / "t.csv")


def test_texts_of_their_own_in_every_row_are_warned_of(file: Path) -> None:
    write(file, {"name": [f"user {at}" for at in range(100)], "x": range(100), "y": [0, 1] * 50})
    (warning,) = open_table(file).warnings
    assert "column 'name': 80 different texts in 80 training rows" in warning
    assert "--set 'data.ignore=[name]'" in warning
    assert open_table(file, ignore=["name"]).warnings == ()


@pytest.mark.parametrize("name", ["images/0.png", "notes.txt"])
def test_a_column_of_file_names_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    write(tmp_path / "t.csv", {"file": [name] * 40, "x": range(40), "y": [0, 1] * 20})
    with pytest.raises(RequestError, match=f"column 'file' of .*t.csv names files \\({name}\\)") as refused:
        open_table(tmp_path / "t.csv")
    assert "--data module:factory" in refused.value.remedy
    assert open_table(tmp_path / "t.csv", ignore="file").input_shape == (1,)


def test_other_files_are_read_in_the_notation_of_training(tmp_path: Path) -> None:
    prices = [f"{number:,.2f}" for number in range(900, 1100)]
    write(tmp_path / "t.csv", {"price": prices, "day": ["2024-01-31"] * 200, "y": range(200)})
    write(tmp_path / "alike.csv", {"price": ["1,001", "950"], "day": ["2024-01-31"] * 2, "y": [101, 50]})
    source = open_table(tmp_path / "t.csv", test_file="alike.csv", new="alike.csv")
    inputs, targets = source.train.tensors  # type: ignore[attr-defined]
    at = {int(target): row for row, target in zip(inputs, targets, strict=True)}
    for split in (source.test, source.new):
        rows = split.tensors[0]  # type: ignore[union-attr]
        assert all(rows[index].equal(at[target]) for index, target in enumerate((101, 50)) if target in at)
    write(tmp_path / "other.csv", {"price": ["1.001,50"], "day": ["31.1.2024"], "y": [1]})
    for name in ("test_file", "new"):
        with pytest.raises(RequestError, match=r"other\.csv:2: '1\.001,50' in column 'price' is not a number"):
            open_table(tmp_path / "t.csv", **{name: "other.csv"})


def test_tables_of_earlier_versions_have_the_same_signature(file: Path) -> None:
    """`predict` refuses weights whose features have another signature; these two were computed by version 0.2."""
    words = [["red", "", "NA", "blue"][at % 4] for at in range(60)]
    marked = {"a": [at / 4 for at in range(60)], "b": words, "c": [at % 3 or "NA" for at in range(60)]}
    write(file, {**marked, "y": [at % 2 for at in range(60)]})
    assert open_table(file).signature() == "b2dce19772345db1"
    commas = {"a": [f"{at},5" for at in range(60)], "b": [f"{at}.25" for at in range(60)]}
    write(file, {**commas, "y": [f"k{at % 3}" for at in range(60)]}, ";")
    assert open_table(file).signature() == "18d92a0dd7e177fe"
    grouped = open_table(write(file, {"a": ["1,000", "2,000.5"] * 30, "y": [0, 1] * 30}))
    same = open_table(write(file, {"a": ["1,000", "2,000.5"] * 30, "y": [0, 1] * 30}), decimal="point")
    assert grouped.signature() == same.signature()


@given(
    st.lists(st.integers(-999_999, 999_999), min_size=12, max_size=40, unique=True), st.sampled_from(["(", "\u2212"])
)
def test_negative_numbers_of_accountants_are_read(file: Path, numbers: list[int], sign: str) -> None:
    """In brackets, or with the typographic minus, alone and with thousands separators."""
    for group in ("", ","):
        negative = "({})" if sign == "(" else f"{sign}{{}}"
        cells = [f"{n:{group}}" if n >= 0 else negative.format(f"{-n:{group}}") for n in numbers]
        table = read_numbers(file, {"a": cells, "b": cells})
        assert table.parse("a")[0].tolist() == numbers


@pytest.mark.parametrize("values", [[1.7e9 + at for at in range(40)], [1e8 + at % 30 for at in range(90)]])
def test_target_that_float32_would_round_is_refused(file: Path, values: list[float]) -> None:
    write(file, {"a": list(range(len(values))), "y": [f"{value:.0f}" for value in values]})
    with pytest.raises(RequestError, match=r"column 'y': numbers such as .* are rounded by .* in float32"):
        open_table(file, kind="regression")


def test_column_whose_name_yaml_reads_as_a_number_is_found(file: Path) -> None:
    """`--set data.target=007` arrives as 7, and 1_1 as 11."""
    rows = {"a": range(40), "1_1": [at % 2 for at in range(40)], "07": range(40)}
    write(file, rows)
    assert open_table(file, 11).num_classes == 2  # type: ignore[arg-type]
    write(file, rows | {"7": [at % 3 for at in range(40)]})
    with pytest.raises(RequestError, match=r"7 may be column '07' or '7', which YAML reads as the same number"):
        open_table(file, 7)  # type: ignore[arg-type]
    assert open_table(file, "7").num_classes == 3
