import os
import traceback
from pathlib import Path

import pyarrow
import pytest

from multigpu_cli.data.rows.arrow import ArrowStore, find_arrow_files
from multigpu_cli.errors import RequestError
from tests.support import safe_forks  # noqa: F401
from tests.support.row_files import ROWS, write_arrow


def test_what_hugging_face_wrote(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "vector": datasets.Sequence(datasets.Value("float32"), length=3),
            "plane": datasets.Array2D((2, 2), "uint8"),
        }
    )
    rows = {
        "label": [0, 1] * 5,
        "vector": [[n, 1, 2] for n in range(10)],
        "plane": [[[n, 1], [2, 3]] for n in range(10)],
    }
    whole = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(str(tmp_path / "data"))
    files = find_arrow_files(str(tmp_path / "data"))
    assert list(files) == ["train", "test"]
    store = ArrowStore(files["train"])
    assert store.columns["label"].class_names == ("no", "yes")
    assert store.columns["plane"].shape == (2, 2)
    assert store.read("vector", [7, 2]).tolist() == [[7, 1, 2], [2, 1, 2]]
    assert store.read("plane", [9]).tolist() == [[[9, 1], [2, 3]]]


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table({"a": list(range(200_000))})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    file = str(tmp_path / "a.arrow")
    with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema, options=options) as out:
        out.write_table(table)
    with pytest.raises(RequestError, match="is compressed"):
        ArrowStore([tmp_path / "a.arrow"])


@pytest.mark.parametrize("content", [b"", b"no arrow at all"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(RequestError, match=r"a\.arrow|no rows"):
        ArrowStore([tmp_path / "a.arrow"])


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    file = write_arrow(tmp_path) / "data.arrow"
    file.write_bytes(file.read_bytes()[:1500])
    with pytest.raises(RequestError, match=r"data\.arrow"):
        ArrowStore([file])


def _write_columns(folder: Path) -> Path:
    """Write a file of texts, bytes, lists and numbers whose buffers lie where a test can find them."""
    rows = range(40)
    table = pyarrow.table(
        {
            "text": [f"text {n}" * (n % 4) for n in rows],
            "bytes": [bytes([n]) * (n % 5 + 1) for n in rows],
            "list": [[float(n), 2.0, 3.0] for n in rows],
            "lists": [[[n, 1], [2, 3]] for n in rows],
            "fixed": pyarrow.array([[n, 2] for n in rows], pyarrow.list_(pyarrow.float32(), 2)),
            "label": [n % 2 for n in rows],
        }
    )
    file = folder / "data.arrow"
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table, max_chunksize=13)
    return file


def test_damaged_offsets_end_in_messages_not_in_crashes(tmp_path: Path) -> None:
    """Every fifth word of the file in turn holds a number that is too large; a crash would end the fork by a signal."""
    file = _write_columns(tmp_path)
    content = file.read_bytes()
    process = os.fork()
    if process == 0:
        refusals = 0
        try:
            for at in range(0, len(content) - 4, 20):
                file.write_bytes(content[:at] + (2**24).to_bytes(4, "little") + content[at + 4 :])
                try:
                    store = ArrowStore([file])
                    for column in store.columns.values():
                        if column.kind != "other":
                            store.read(column.name, range(min(len(store), 40)))
                except RequestError:
                    refusals += 1
            os._exit(0 if refusals > 20 else 98)
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = _write_columns(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"text 5", b"text \xff"))
    with pytest.raises(RequestError, match=r"column 'text' has a text that is not UTF-8"):
        ArrowStore([file]).read("text", range(40))


def test_files_of_different_columns_are_refused(tmp_path: Path) -> None:
    one, two = write_arrow(tmp_path / "a"), write_arrow(tmp_path / "b", [{"a": 1}])
    with pytest.raises(RequestError, match="different columns"):
        ArrowStore([one / "data.arrow", two / "data.arrow"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{}", "can't be read"),
        ("[" * 100_000, "state.json can't be read"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "is missing"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', "not in its folder"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}', "flatten_indices"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, state: str, message: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(RequestError) as refused:
        find_arrow_files(str(tmp_path))
    assert message in str(refused.value) + str(refused.value.remedy)


def test_the_rows_of_two_files_follow_each_other(tmp_path: Path) -> None:
    one, two = write_arrow(tmp_path / "a", ROWS[:9]), write_arrow(tmp_path / "b", ROWS[9:], batch=100)
    store = ArrowStore([one / "data.arrow", two / "data.arrow"])
    assert store.read("a", [8, 9, 59]).tolist() == [2.0, 2.25, 14.75]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ("[" * 100_000, "no JSON"),
        ('{"info": {"features": {"label": {"_type": "ClassLabel", "names": 7}}}}', "'label' are no texts"),
        ('{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a", 7]}}}}', "'label' are no texts"),
        ('{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["\\ud800"]}}}}', "no JSON"),
    ],
)
def test_hostile_features_are_refused_with_the_file(tmp_path: Path, features: str, message: str) -> None:
    table = pyarrow.table({"label": [0, 1]}).replace_schema_metadata({b"huggingface": features.encode()})
    file = str(tmp_path / "a.arrow")
    with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    with pytest.raises(RequestError, match=rf"a\.arrow: .*{message}"):
        ArrowStore([tmp_path / "a.arrow"])
