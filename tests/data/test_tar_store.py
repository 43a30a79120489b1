import os
import tarfile
import tracemalloc
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers

from multigpu_cli.data.rows.tar import TarStore
from multigpu_cli.errors import RequestError
from tests.support.row_files import encode_array, make_samples, write_tar

SAMPLES = make_samples()[:20]


def open_shards(folder: Path) -> TarStore:
    return TarStore(sorted(folder.glob("*.tar")))


def test_the_index_is_made_once_and_anew_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path, SAMPLES)
    assert len(open_shards(tmp_path)) == 20
    (index,) = tmp_path.glob(".multigpu-*.index")
    with monkeypatch.context() as without:
        without.setattr(TarStore, "_index", lambda *_: pytest.fail("made again"))
        assert open_shards(tmp_path).read("cls", [0, 19]).tolist() == [0, 1]
    whole = index.read_bytes()
    for size in (0, 8, len(whole) - 3):
        index.write_bytes(whole[:size])
        assert len(open_shards(tmp_path)) == 20, "half an index is none"
    write_tar(tmp_path, SAMPLES[::-1])
    shard = tmp_path / "0000.tar"
    os.utime(shard, ns=(shard.stat().st_atime_ns, shard.stat().st_mtime_ns + 1))
    assert open_shards(tmp_path).read("cls", [0, 19]).tolist() == [1, 0]
    assert not list(tmp_path.glob("*.draft"))


def swap_classes(index: Path) -> None:
    """Exchange the class numbers 0 and 1, which an index of shards holds, and leave all else."""
    content = index.read_bytes()
    end = len(content) - 16 - int.from_bytes(content[-16:-8], "little")
    rows = np.frombuffer(content[:end], dtype=np.int64).reshape(20, -1).copy()
    column = next(column for column in range(rows.shape[1]) if rows[0, column + 1] == -2)  # a number in place of a size
    rows[:, column] = 1 - rows[:, column]
    index.write_bytes(rows.tobytes() + content[end:])


def test_index_is_made_again_if_its_numbers_were_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In silence, all samples would get the labels of others."""
    labels = open_shards(write_tar(tmp_path, SAMPLES)).read("cls", range(20)).tolist()
    (index,) = tmp_path.glob(".multigpu-*.index")
    intact = index.read_bytes()
    swap_classes(index)
    assert open_shards(tmp_path).read("cls", range(20)).tolist() == labels
    assert str(index) in caplog.text
    assert "damaged" in caplog.text
    assert index.read_bytes() == intact


@given(position=integers(min_value=0), bit=integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_index_with_any_flipped_bit_gives_the_same_rows(position: int, bit: int) -> None:
    with TemporaryDirectory() as name:
        folder = write_tar(Path(name), SAMPLES[:5])
        rows = open_shards(folder)._rows.tolist()
        (index,) = folder.glob(".multigpu-*.index")
        content = bytearray(index.read_bytes())
        content[position % len(content)] ^= 1 << bit
        index.write_bytes(content)
        assert open_shards(folder)._rows.tolist() == rows


@pytest.mark.parametrize("trap", ["fifo", "link", "folder"])
def test_index_that_is_no_regular_file_is_not_opened(trap: str, tmp_path: Path) -> None:
    """A FIFO would block for good; a link leads to a file of somebody else's choice."""
    write_tar(tmp_path, SAMPLES)
    open_shards(tmp_path)
    (index,) = tmp_path.glob(".multigpu-*.index")
    swap_classes(index)
    index.rename(tmp_path / "elsewhere")
    {"fifo": os.mkfifo, "link": lambda path: path.symlink_to("elsewhere"), "folder": Path.mkdir}[trap](index)
    assert open_shards(tmp_path).read("cls", [0, 19]).tolist() == [0, 1]


@pytest.mark.parametrize("reason", ["owner", "mode"])
def test_index_that_others_could_write_is_not_read(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever writes it chooses the labels; the data's own owner does so anyway."""
    if reason == "owner" and os.geteuid():
        pytest.skip("only root can give a file to another user")
    write_tar(tmp_path, SAMPLES)
    open_shards(tmp_path)
    (index,) = tmp_path.glob(".multigpu-*.index")
    intact = index.read_bytes()
    if reason == "mode":
        index.chmod(0o666)
    else:
        os.chown(index, 65534, -1)
    assert open_shards(tmp_path).read("cls", [0, 19]).tolist() == [0, 1]
    assert str(index) in caplog.text
    assert "others can write" in caplog.text
    assert index.read_bytes() == intact


def test_columns_and_values(tmp_path: Path) -> None:
    store = open_shards(write_tar(tmp_path, SAMPLES))
    assert {name: column.kind for name, column in store.columns.items()} == {
        "npy": "number", "cls": "number",
        "json.a": "number", "json.b": "number", "json.label": "number", "json.kind": "text",
    }  # fmt: skip
    assert store.read("npy", [3, 1]).tolist() == [[0.75, 3.0], [0.25, 1.0]]
    assert store.read("json.kind", [1]) == ["dog"]
    assert store.list_values("cls") == [0, 1]


def test_members_in_hidden_folders_are_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for folder in ("__MACOSX/", "./.ipynb_checkpoints/", "./", "../a/", "b/.git/", ""):
            archive.addfile(tarfile.TarInfo(f"{folder}._0001.jpg"))
            archive.addfile(tarfile.TarInfo(f"{folder}0001.jpg"))
    assert len(open_shards(tmp_path)) == 3


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{**SAMPLES[0], "cls": b"cat"}], "not a 64-bit integer"),
        ([{**SAMPLES[0], "cls": b"9" * 30}], "not a 64-bit integer"),
        ([{**SAMPLES[0], "cls": b"1_1"}], "not a 64-bit integer"),
        ([{**SAMPLES[0], "cls": "٣".encode()}], "not a 64-bit integer"),
        ([*SAMPLES[:2], {"jpg": b"x"}], r"the first sample has no \.jpg"),
    ],
)
def test_samples_that_differ_are_refused(tmp_path: Path, samples: list[dict[str, bytes]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        open_shards(write_tar(tmp_path, samples, shards=1))
    assert not list(tmp_path.glob(".multigpu-*")), "nothing half made is left"


@pytest.mark.parametrize(("ending", "content"), [("npy", b"no array"), ("txt", "ä".encode("latin1"))])
def test_a_member_that_can_not_be_read_is_named(tmp_path: Path, ending: str, content: bytes) -> None:
    write_tar(tmp_path, [{ending: content, "cls": b"1"}])
    with pytest.raises(RequestError, match=rf"a \.{ending}"):
        open_shards(tmp_path).read(ending, [0])


def test_a_compressed_shard_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(RequestError) as refused:
        open_shards(tmp_path)
    assert "gunzip a.tar" in str(refused.value.remedy)


def test_a_shard_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path, SAMPLES, shards=1)
    shard = tmp_path / "0000.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(RequestError, match=r"unexpected end|ends at byte"):
        open_shards(tmp_path).read("npy", range(len(open_shards(tmp_path))))


def make_header(name: str, size: int, kind: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.USTAR_FORMAT)


def make_pax(**records: str) -> bytes:
    """A header of pax; the length of each record counts its own digits."""
    lines = [f" {name.replace('__', '.')}={value}\n" for name, value in records.items()]
    content = b"".join(b"%d" % (len(line) + 2) + line.encode() for line in lines)
    return make_header("pax", len(content), b"x") + content.ljust(512, b"\0")


MEMBER = make_header("a.cls", 1, b"0") + b"1".ljust(512, b"\0") + bytes(1024)
LONG_NAME = make_header("././@LongLink", 5, b"L") + b"aaaa\0".ljust(512, b"\0")


@pytest.mark.parametrize(
    "content",
    [
        LONG_NAME * 3000 + MEMBER,
        make_pax(GNU__sparse__map="0,zz", GNU__sparse__size="abc") + MEMBER,
        make_pax(GNU__sparse__major="1", GNU__sparse__minor="0", GNU__sparse__realsize="5") + MEMBER,
        make_pax(size="9" * 30) + MEMBER,
        make_header("pax", 2**30, b"x") + MEMBER,
        make_header("././@LongLink", 2**30, b"L") + MEMBER,
    ],
    ids=["long names", "sparse map", "sparse 1.0", "size", "long pax", "long name"],
)
def test_shard_with_hostile_headers_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "0.tar").write_bytes(content)
    os.truncate(tmp_path / "0.tar", max(len(content), 2**30 * (len(content) < 4096)))  # sparse on the disk
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=r"--data tar: .*0\.tar: "):
            open_shards(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_member_of_negative_size_is_refused(tmp_path: Path) -> None:
    header = bytearray(make_header("a.cls", 1, b"0"))
    header[124:136] = b"\xff" * 12  # -1 in base 256
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "0.tar").write_bytes(bytes(header) + bytes(1024))
    with pytest.raises(RequestError, match="-1 bytes"):
        open_shards(tmp_path)


def make_npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def make_npz() -> bytes:
    file = BytesIO()
    np.savez(file, a=np.ones(2, np.float32))
    return file.getvalue()


@pytest.mark.parametrize("row", [0, 7])
@pytest.mark.parametrize(
    ("ending", "content"),
    [
        ("npy", make_npz()),
        ("npy", make_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }\n")),
        ("npy", make_npy("{'descr': " + "[" * 300 + "]" * 300 + ", 'fortran_order': False, 'shape': (2,), }\n")),
        ("json", b'{"kind": "cat", "a": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        ("json", b'{"kind": "\\ud800a"}'),
    ],
)
def test_hostile_member_is_named(tmp_path: Path, row: int, ending: str, content: bytes) -> None:
    samples = [dict(sample) for sample in SAMPLES]
    samples[row][ending] = content
    write_tar(tmp_path, samples, shards=1)
    with pytest.raises(RequestError, match=rf"--data tar: .*0000\.tar: a \.{ending}"):
        open_shards(tmp_path).read("npy" if ending == "npy" else "json.kind", [row])


@pytest.mark.parametrize("dtype", ["V9", "U3", "M8[s]"])
def test_arrays_without_numbers_are_no_numbers(tmp_path: Path, dtype: str) -> None:
    write_tar(tmp_path, [sample | {"npy": encode_array(np.zeros(2, dtype))} for sample in SAMPLES])
    assert open_shards(tmp_path).columns["npy"].kind == "other"
