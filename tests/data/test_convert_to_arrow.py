import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from multigpu_cli.data.rows import convert as module
from multigpu_cli.data.rows.arrow import ArrowStore, find_arrow_files
from multigpu_cli.data.rows.convert import convert_to_arrow
from multigpu_cli.errors import RequestError
from tests.config.test_regular_files import within_seconds
from tests.support.row_files import ROWS, write_jsonl


def write_csv(path: Path) -> Path:
    path.write_text("\n".join([",".join(ROWS[0]), *(",".join(map(str, row.values())) for row in ROWS)]) + "\n")
    return path


def read(folder: Path) -> list[dict[str, object]]:
    store = ArrowStore(find_arrow_files(str(folder))["train"])
    columns = {name: list(store.read(name, range(len(store)))) for name in store.columns}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    table = table.set_column(3, "kind", table.column("kind").dictionary_encode())
    (tmp_path / "many").mkdir()
    parquet.write_table(table[:20], tmp_path / "many" / "0.parquet")
    parquet.write_table(table[20:], tmp_path / "many" / "1.parquet")
    (tmp_path / "many" / "._0.parquet").write_bytes(b"macOS")
    sources = [tmp_path / "many", write_csv(tmp_path / "a.csv"), write_jsonl(tmp_path / "a.jsonl")]
    for number, source in enumerate(sources):
        found = convert_to_arrow(source, tmp_path / "to" / str(number))
        assert (found["rows"], found["files"]) == (60, 1)
        assert read(tmp_path / "to" / str(number)) == ROWS
    state = json.loads((tmp_path / "to" / "0" / "state.json").read_text())
    assert [each["filename"] for each in state["_data_files"]] == ["data-00000-of-00001.arrow"]
    assert [each.name for each in (tmp_path / "to").iterdir() if each.name.startswith(".")] == []


def test_hugging_face_reads_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    convert_to_arrow(write_csv(tmp_path / "a.csv"), tmp_path / "to")
    assert list(datasets.load_from_disk(str(tmp_path / "to"))) == ROWS


def test_large_tables_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 400)
    monkeypatch.setattr(module, "_PIECE", 300)
    monkeypatch.setattr(module, "_FILE", 1000)
    found = convert_to_arrow(write_csv(tmp_path / "a.csv"), tmp_path / "to")
    assert found["files"] > 1
    assert read(tmp_path / "to") == ROWS
    assert found["bytes"] == sum(file.stat().st_size for file in (tmp_path / "to").glob("*.arrow"))


def test_numbers_with_leading_zeros_stay_texts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("zip,x,label\n01067,1,007\n80331,02.5,7\n1067,0.5,0070\n")
    convert_to_arrow(tmp_path / "a.csv", tmp_path / "to")
    assert read(tmp_path / "to") == [
        {"zip": "01067", "x": "1", "label": "007"},
        {"zip": "80331", "x": "02.5", "label": "7"},
        {"zip": "1067", "x": "0.5", "label": "0070"},
    ]


def test_an_existing_target_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    with pytest.raises(RequestError, match="exists already"):
        convert_to_arrow(write_csv(tmp_path / "a.csv"), tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.jsonl": '{"a": 1}\n{"a": "x"}\n'}, "after 0 rows"),
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x,z\n1,2\n"}, "other columns"),
        ({"a.csv": "x,y\n1,2\n", "b.jsonl": '{"a": 1}\n'}, "files of 2 kinds"),
        ({"a.txt": "x"}, "nothing that can be converted"),
        ({"a.parquet": "no parquet at all"}, "a.parquet"),
    ],
)
def test_what_is_damaged_leaves_nothing(tmp_path: Path, files: dict[str, str], message: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, text in files.items():
        (source / name).write_text(text)
    with pytest.raises(RequestError, match=message):
        convert_to_arrow(source, tmp_path / "to")
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


_SMALL_DISK = """
import resource, signal, sys
from main_multi_gpu import run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
code = run(["data", "convert", sys.argv[1], "--to", sys.argv[2]])
resource.setrlimit(resource.RLIMIT_FSIZE, before)  # coverage writes its figures at the end
raise SystemExit(code)
"""


def test_a_full_disk_is_a_wrong_request_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ROWS * 10)
    arguments = [sys.executable, "-c", _SMALL_DISK, str(source), str(tmp_path / "to")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert f"--to {tmp_path / 'to'}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}\n",
        '{"a": ' + '{"b":\n' * 200_000 + "1" + "}" * 200_000 + "}\n",
        '{"a": "' + "x" * 400 + "\n" + "[" * 200_000,  # pyarrow reads the second line by itself
        '{"a": 1}\n' + "]" * 200_000 + "\n" + "[" * 200_000,
    ],
)
def test_convert_refuses_jsonl_that_is_nested_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """In a process of its own, which pyarrow would end."""
    monkeypatch.setattr(module, "_PIECE", 500)
    (tmp_path / "a.jsonl").write_text(text)
    code = (
        "import sys; from main_multi_gpu import run; raise SystemExit(run(['data', 'convert', sys.argv[1], "
        "'--to', sys.argv[2]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.jsonl"), str(tmp_path / "to")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2, ended.stderr
    assert "a.jsonl" in ended.stderr
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 64])
def test_convert_accepts_jsonl_with_brackets_in_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    rows = [{"a": "[" * 300 + '\\"[\\\\', "b": [{"c": [number, 2]}]} for number in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(module, "_PIECE", piece)
    module._check_nesting(tmp_path / "a.jsonl")
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write((tmp_path / "a.jsonl").read_bytes() + b"[" * 101)
    with pytest.raises(RequestError, match=r"b\.jsonl\.gz: JSON that is nested"):
        module._check_nesting(tmp_path / "b.jsonl.gz")


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.jsonl", "a.parquet"])
def test_convert_refuses_a_fifo(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with within_seconds(20), pytest.raises(RequestError, match=f"SOURCE: .*{name} is a FIFO"):
        convert_to_arrow(tmp_path / name, tmp_path / "to")
