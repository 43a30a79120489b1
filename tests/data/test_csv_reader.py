import gzip
from pathlib import Path

import pytest

from multigpu_cli.data.tables.csv import CsvFormat, CsvTable, read_csv, read_decimal_commas
from multigpu_cli.data.tables.table import load
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.factories import call_factory


def table(folder: Path, content: str | bytes, **form: str) -> CsvTable:
    path = folder / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = read_csv(path, CsvFormat(**form))
    read_decimal_commas(found, {})
    return found


def read_refusal(folder: Path, content: str | bytes, **form: str) -> str:
    with pytest.raises(RequestError) as error:
        table(folder, content, **form)
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "form"),
    [
        ("a,b\n1,x\n2,y\n", {}),
        ("a;b\n1;x\n2;y", {}),
        ("a\tb\n1\tx\n2\ty\n", {}),
        ("a, b\r\n\r\n1, x\r\n  \r\n2, y\r\n", {}),
        ("a,b\r1,x\r2,y\r", {}),
        ('\ufeff"a","b"\n"1","x"\n2,y\n', {}),
        ("sep=|\r\na|b\n1|x\n2|y\n", {}),
        (gzip.compress(b"a,b\n1,x\n2,y\n", mtime=0), {}),
        ("a\tb\n1\tx\n2\ty\n".encode("utf-16"), {}),
        ("a|b\n1|x\n2|y\n", {"separator": "bar"}),
        ("a b\n1   x\n2 y\n", {"separator": "space"}),
        ("a#b\n1#x\n2#y\n", {"separator": "#"}),
    ],
)
def test_files_that_say_the_same_in_other_ways(tmp_path: Path, content: str | bytes, form: dict[str, str]) -> None:
    found = table(tmp_path, content, **form)
    assert (found.columns, found.rows, found.warnings) == (["a", "b"], [["1", "x"], ["2", "y"]], ())


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ('a,b\n"x; y; z",1\n"p; q; r",2\n', [["x; y; z", "1"], ["p; q; r", "2"]]),
        ("a;b\nx, y;1\np;2\n", [["x, y", "1"], ["p", "2"]]),
        ("a, or b, or c;d\nx;1\np;2\n", [["x", "1"], ["p", "2"]]),
        ('a,b\n"say ""no""",1\n', [['say "no"', "1"]]),
        ('a,b\n5" pipe,1\n', [['5" pipe', "1"]]),
    ],
)
def test_separators_within_cells_separate_nothing(tmp_path: Path, content: str, rows: list[list[str]]) -> None:
    assert table(tmp_path, content).rows == rows


def test_rows_know_the_lines_where_they_begin(tmp_path: Path) -> None:
    found = table(tmp_path, 'a,b\n\n"two\nlines",1\n\nx,2\n')
    assert (found.rows, found.lines) == ([["two\nlines", "1"], ["x", "2"]], [3, 6])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "t.csv: no rows"),
        ("a,b\n", "t.csv: no rows below the header"),
        ("a,b\n1,2\n\n3\n", "t.csv:4: 1 cells for 2 columns"),
        ("a;b\n1;2\n3;4;5\n", "t.csv:3: 3 cells for 2 columns"),
        ('a,b\n1,2\n"3,4\n5,6\n', "t.csv:3: unexpected end of data"),
        ('a,b\n"3"x,4\n', "t.csv:2: ',' expected after '\"'"),
        ("a,a\n1,2\n", "two columns have the same name, 'a'"),
        ("0,0\n0,1\n1,0\n", "--set data.header=none"),
        ("a,b\n1,é\n".encode("latin1"), "t.csv:2: not UTF-8 (byte 0xe9)"),
        (b"a,b\n1,\0\n", "t.csv:2: a zero byte"),
        (gzip.compress(b"a,b\n1,2\n", mtime=0)[:-9], "t.csv: Compressed file ended"),
    ],
)
def test_what_makes_no_table_is_named_with_its_line(tmp_path: Path, content: str | bytes, words: str) -> None:
    assert words in read_refusal(tmp_path, content)


@pytest.mark.parametrize(("name", "value"), [("separator", "::"), ("header", "0"), ("decimal", ",")])
def test_an_unknown_way_of_writing_is_refused(name: str, value: str) -> None:
    with pytest.raises(RequestError, match=f"data.args.{name} must be .* not {value!r}"):
        call_factory(load, {"data_dir": "t.csv", "seed": 1}, {name: value}, where="data")


@pytest.mark.parametrize(
    ("head", "warns"),
    [
        ("5.1,3.5,setosa", True),
        ("p,x,s", True),
        ("width,height,kind", False),
        ("1,width,kind", False),
        (",height,kind", False),
        (",,kind", False),
    ],
)
def test_a_first_row_that_looks_like_data_is_said(tmp_path: Path, head: str, warns: bool) -> None:
    words = head.startswith("p")
    body = "p,x,s\ne,x,t\np,y,s\n" if words else "4.9,3.0,setosa\n6.3,2.8,virginica\n"
    found = table(tmp_path, f"{head}\n{body}")
    assert bool(found.warnings) == warns
    if warns:
        assert "the first row looks like data" in found.warnings[0]
        assert "--set data.header=none" in found.warnings[0]
        unnamed = table(tmp_path, f"{head}\n{body}", header="none")
        assert (unnamed.columns, unnamed.rows[0], unnamed.lines[0]) == (["0", "1", "2"], head.split(","), 1)
        assert not unnamed.warnings


@pytest.mark.parametrize(
    ("content", "form", "rows"),
    [
        ("a;b\n1,5;x, y\n-2,25e3;z\n", {}, [["1.5", "x, y"], ["-2.25e3", "z"]]),
        ("a;b\n1,5;x\nNA;y\n2;z\n", {}, [["1.5", "x"], ["NA", "y"], ["2", "z"]]),
        ("1,5;2,5\n3,5;4,5\n", {"header": "none"}, [["1.5", "2.5"], ["3.5", "4.5"]]),
        ("a\tb\n1,5\t1,2,3\n2,5\t4\n", {}, [["1.5", "1,2,3"], ["2.5", "4"]]),
        ('a,b\n"1,5",x\n"2,5",y\n', {}, [["1,5", "x"], ["2,5", "y"]]),
        ('a,b\n"1,5",x\n"2,5",y\n', {"decimal": "comma"}, [["1.5", "x"], ["2.5", "y"]]),
        ("a;b\n1,5;x\n2,5;y\n", {"decimal": "point"}, [["1,5", "x"], ["2,5", "y"]]),
    ],
)
def test_decimal_commas(tmp_path: Path, content: str, form: dict[str, str], rows: list[list[str]]) -> None:
    assert table(tmp_path, content, **form).rows == rows


def test_numbers_written_in_two_ways_are_refused(tmp_path: Path) -> None:
    assert "t.csv:3: '2.5' in column 'a', and '1,5' in line 2" in read_refusal(tmp_path, "a;b\n1,5;x\n2.5;y\n")


def test_gzip_that_unpacks_too_far_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigpu_cli.data.tables.csv._UNPACKED", 2**20)
    content = b"a,b\n" + b"1,0\n" * 2**20
    assert "gunzip t.csv" in read_refusal(tmp_path, gzip.compress(content))
    assert len(table(tmp_path, gzip.compress(content[: 2**19])).rows) == 2**17 - 1
