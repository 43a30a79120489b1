"""Datasets, recipes, indexes and models that somebody made to hurt: each is refused, or trained on, in bounded time."""

import gzip
import json
import os
import random
import resource
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.forked_command import Outcome, call
from tests.support.row_files import encode_array, encode_image, write_tar
from tests.support.tiny_language_models import make_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_tmp_path")]
TRAIN = ("--max-steps", "2", "--quiet", "--multi-gpu", "none", "--num-workers", "0", "--save-dir", "run")
Make = Callable[[], object]


def train(*words: str, seconds: int = 60, gib: float = 6) -> Outcome:
    """Train two steps, with `gib` GiB of addresses more than the test has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(gib * 2**30)
    prepare = lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # noqa: E731
    return call([*words, *TRAIN], Path.cwd(), Path.cwd(), seconds=seconds, prepare=prepare)


def make_npy(shape: str, dtype: str = "<f4") -> bytes:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def write_npz(x: bytes, y: bytes) -> None:
    with zipfile.ZipFile("a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", x)
        archive.writestr("y.npy", y)


def write_bomb() -> None:
    """1 GiB of zeros in 1 MiB."""
    with zipfile.ZipFile("a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, header, size in (
            ("X", make_npy("(33554432, 8)"), 2**30),
            ("y", make_npy("(33554432,)", "|u1"), 2**25),
        ):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(header)
                for _ in range(size // 2**24):
                    file.write(bytes(2**24))


def damage_npz(change: Callable[[bytearray], object]) -> None:
    rng = np.random.default_rng(0)
    np.savez_compressed("a.npz", X=rng.normal(size=(200, 8)).astype("f4"), y=rng.integers(0, 3, 200))
    content = bytearray(Path("a.npz").read_bytes())
    change(content)
    Path("a.npz").write_bytes(content)


def set_method(content: bytearray) -> None:
    content[8] = content[content.find(b"PK\x01\x02") + 10] = 99


CODE = b"\x93NUMPY\x01\x00" + struct.pack("<H", 60) + b"__import__('os').system('touch owned')".ljust(59) + b"\n"
NPZ: dict[str, Make] = {
    "10^12 rows": lambda: write_npz(make_npy("(1000000000000, 8)"), make_npy("(1000000000000,)", "<i8")),
    "negative shape": lambda: write_npz(make_npy("(-5, 8)"), make_npy("(-5,)", "<i8")),
    "shape beyond 2^64": lambda: write_npz(make_npy("(99999999999999999999999, 8)"), make_npy("(3,)", "<i8")),
    "objects": lambda: write_npz(make_npy("(3,)", "|O"), make_npy("(3,)", "<i8")),
    "code": lambda: write_npz(CODE, make_npy("(3,)", "<i8")),
    "cut": lambda: damage_npz(lambda content: content.__delitem__(slice(len(content) // 2, None))),
    "method": lambda: damage_npz(set_method),
    "class 2^62": lambda: np.savez("a.npz", X=np.ones((200, 8), "f4"), y=np.full(200, 2**62)),
    "class -5": lambda: np.savez("a.npz", X=np.ones((200, 8), "f4"), y=np.arange(200) % 3 - 5),
    "bomb": write_bomb,
}


@pytest.mark.parametrize("name", NPZ)
def test_hostile_npz_is_refused(name: str) -> None:
    NPZ[name]()
    outcome = train("--data", "a.npz", "--model", "mlp", gib=0.9 if name == "bomb" else 3)
    assert outcome.is_clear(), outcome
    assert not Path("owned").exists()


ROWS = "".join(f"{n},{n % 7},{n % 3}\n" for n in range(100))
CSV: dict[str, str | bytes] = {
    "formula": 'a,=HYPERLINK("http://evil"),y\n' + ROWS,
    "NUL": b"a,b,y\n" + b"1\x00,2,1\n" * 100,
    "line of 20 MB": "a,b,y\n1,2,0\n" + "9" * 20_000_000 + ",1,1\n" + ROWS,
    "open quote": 'a,b,y\n"1,2,0\n' + ROWS * 100,
    "50,000 columns": ",".join(f"c{n}" for n in range(50_000)) + ",y\n" + (",".join(["1"] * 50_000) + ",0\n") * 3,
    "not UTF-8": b"a,b,y\n" + b"\xff\xfe,2,1\n" * 3,
    "empty": "",
    "column twice": "a,a,y\n" + "1,2,0\n3,4,1\n" * 60,
    "1e999": "a,b,y\n" + "".join(f"1e999,{n},{n % 2}\n" for n in range(100)),
}


@pytest.mark.parametrize("name", [*CSV, "compressed and cut"])
def test_hostile_csv_is_refused_or_trained_on(name: str) -> None:
    file, content = Path("a.csv"), CSV.get(name, b"")
    if name == "compressed and cut":
        file, content = Path("a.csv.gz"), gzip.compress(b"a,b,y\n" + ROWS.encode())[:-30]
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    outcome = train("--data", str(file), "--model", "mlp", "--set", "data.args.target=y")
    assert outcome.is_clear(), outcome


def write_png(width: int, height: int, file: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 10**6)), chunk(b"IEND", b"")]
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


IMAGES: dict[str, Callable[[Path], object]] = {
    "60,000 by 60,000": lambda file: write_png(60_000, 60_000, file),
    "13,000 by 13,000": lambda file: write_png(13_000, 13_000, file),
    "broken": lambda file: file.write_bytes(b"\x89PNG\r\n\x1a\n" + random.Random(1).randbytes(200)),
    "FIFO": os.mkfifo,
    "endless": lambda file: file.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_hostile_image_is_refused(name: str) -> None:
    for folder in ("a", "b"):
        Path("images", folder).mkdir(parents=True)
        for number in range(12):
            Path("images", folder, f"{number}.png").write_bytes(encode_image(number))
    Path("images/a/0.png").unlink()
    IMAGES[name](Path("images/a/0.png"))
    flags = ("--data", "image-folder", "--data-dir", "images", "--model", "mlp", "--set", "data.args.size=16")
    outcome = train(*flags, "--max-steps", "2", "--batch-size", "32")
    assert outcome.is_clear(), outcome


def array(number: int) -> bytes:
    return encode_array(np.array([number, number % 3], dtype=np.float32))


SAMPLES = [{"x.npy": array(number), "cls": b"%d" % (number % 3)} for number in range(60)]


def resize(field: bytes) -> Callable[[bytearray], None]:
    """Another size in the header of the first member, with its checksum."""

    def change(content: bytearray) -> None:
        content[124:136] = field
        total = sum(content[:148]) + 32 * 8 + sum(content[156:512])
        content[148:156] = b"%06o\0 " % total

    return change


def add_links(file: Path) -> None:
    with tarfile.open(file, "a") as archive:
        for name, kind, target in (
            ("z.cls", tarfile.SYMTYPE, "/etc/passwd"),
            ("z.x.npy", tarfile.LNKTYPE, "/etc/shadow"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member, BytesIO())


def damage_tar(change: Callable[[bytearray], object]) -> Callable[[], None]:
    def damage() -> None:
        file = write_tar(Path("shards"), SAMPLES, 1) / "0000.tar"
        content = bytearray(file.read_bytes())
        change(content)
        file.write_bytes(content)

    return damage


TAR: dict[str, Make] = {
    "links": lambda: add_links(write_tar(Path("shards"), SAMPLES, 1) / "0000.tar"),
    "names above": lambda: write_tar(Path("shards"), [{f"../../{e}": c for e, c in s.items()} for s in SAMPLES], 1),
    "member of 8 GB": damage_tar(resize(b"77777777777\0")),
    "negative size": damage_tar(resize(b"\xff" * 12)),
    "cut": damage_tar(lambda content: content.__delitem__(slice(20_000, None))),
    "class of 5000 digits": lambda: write_tar(Path("shards"), [s | {"cls": b"9" * 5000} for s in SAMPLES], 1),
    "pickle": lambda: write_tar(Path("shards"), [s | {"x.npy": b"\x80\x04c"} for s in SAMPLES], 1),
    "10^12 numbers": lambda: write_tar(
        Path("shards"), [s | {"x.npy": make_npy("(1000000000000,)")} for s in SAMPLES], 1
    ),
}


def train_tar(*words: str) -> Outcome:
    return train("--data", "tar", "--data-dir", "shards", "--model", "mlp", "--set", "data.target=cls", *words)


@pytest.mark.parametrize("name", TAR)
def test_hostile_tar_is_refused_or_trained_on(name: str) -> None:
    TAR[name]()
    outcome = train_tar()
    assert outcome.is_clear(), outcome


def swap_classes(content: bytearray) -> None:
    """Classes 0 and 1 of all rows, as the index has them: the number before a row's -2."""
    foot = int.from_bytes(content[-16:-8], "little")
    width = json.loads(content[-16 - foot : -16])["width"]
    for start in range(0, len(content) - 16 - foot, 8 * width):
        row = struct.unpack_from(f"<{width}q", content, start)
        column = row.index(-2) - 1 if -2 in row else width - 1
        if row[column] < 2:
            struct.pack_into("<q", content, start + 8 * column, row[column] ^ 1)


def put_number(position: int, number: int) -> Callable[[bytearray], None]:
    return lambda content: struct.pack_into("<q", content, 8 * position, number)


INDEXES: dict[str, Callable[[bytearray], object]] = {
    "swapped classes": swap_classes,
    "shard 99": put_number(0, 99),
    "offset 2^62": put_number(1, 2**62),
    "size 2^36": put_number(2, 2**36),
    "class -7": put_number(3, -7),
    "cut": lambda content: content.__delitem__(slice(len(content) // 2, None)),
    "empty": lambda content: content.clear(),
    "nested": lambda content: content.__setitem__(slice(0, -8), b"[" * 200_000 + (200_000).to_bytes(8, "little")),
}


@pytest.mark.parametrize(
    "name", [*INDEXES, "FIFO", "dangling link", pytest.param("of another user", marks=pytest.mark.root)]
)
def test_planted_index_changes_no_training(name: str) -> None:
    """It is made again: with --exact the fingerprint is that of the data."""
    write_tar(Path("shards"), SAMPLES, 1)
    fingerprints = []
    for attempt in range(2):
        outcome = train_tar("--exact")
        assert outcome.is_clear(), outcome
        assert outcome.code == 0, outcome
        fingerprints.append(json.loads(Path("run/summary.json").read_text())["fingerprint"])
        shutil.rmtree("run")
        (index,) = Path("shards").glob(".multigpu-*.index")
        if attempt:
            break
        content = bytearray(index.read_bytes())
        index.unlink()
        if name == "FIFO":
            os.mkfifo(index)
        elif name == "dangling link":
            index.symlink_to(Path("victim").absolute())
        else:
            INDEXES.get(name, swap_classes)(content)
            index.write_bytes(content)
        if name == "of another user":
            os.chown(index, 65534, 65534)
    assert fingerprints[0] == fingerprints[1]
    assert not Path("victim").exists()


JSONL = {
    "nested": '{"x": ' + "[" * 100_000 + "]" * 100_000 + ', "y": 1}\n' + '{"x": 1, "y": 0}\n' * 50,
    "number of 5000 digits": ('{"x": 1, "y": ' + "9" * 5000 + "}\n") * 50,
    "NaN": '{"x": NaN, "y": 0}\n{"x": 1, "y": 1}\n' * 50,
    "duplicate keys": '{"x": 1, "x": 3, "y": 0, "y": 1}\n{"x": 2, "y": 1}\n' * 50,
    "NULs": "\0" * 10**6,
}


@pytest.mark.parametrize("name", JSONL)
def test_hostile_jsonl_is_refused_or_trained_on(name: str) -> None:
    Path("a.jsonl").write_text(JSONL[name])
    outcome = train("--data", "jsonl", "--data-dir", "a.jsonl", "--model", "mlp", "--set", "data.target=y")
    assert outcome.is_clear(), outcome


LAUGHS = "a: &a [x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(9)
)
RECIPES = {
    "billion laughs": LAUGHS,
    "duplicate keys": "seed: 1\nseed: 2\n",
    "nested duplicate": "data: {name: digits, name: mnist}\n",
    "tag": 'x: !!python/object/apply:os.system ["touch owned"]\n',
    "merge key": "<<: {seed: 1}\n",
    "deep": "a: " + "[" * 20_000 + "]" * 20_000,
    "deep block": "".join(" " * n + "a:\n" for n in range(1200)),
    "long number": "seed: " + "9" * 20_000 + "\n",
    "sexagesimal": "seed: 1:30\n",
    "NUL": "seed: 1\0\n",
    "1 MB of colons": ":" * 10**6,
    "300,000 numbers": "data: {args: {a: [" + "1," * 300_000 + "]}}\n",
    "direction": "seed: \u202e1\n",
    "control": 'seed: "\\e[2J"\n',
}


@pytest.mark.parametrize("name", RECIPES)
def test_hostile_recipe_is_refused(name: str) -> None:
    Path("recipe.yaml").write_text(RECIPES[name])
    outcome = train("--config", "recipe.yaml")
    assert outcome.is_clear(), outcome
    assert outcome.code == 2
    assert not Path("owned").exists()


EVIL = "open('owned', 'w').close()\nfrom transformers import GPT2Config as C, GPT2LMHeadModel as M\n"
CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]}
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('touch owned') }}"


def edit(name: str, **values: Any) -> None:
    file = Path("model", name)
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def name_code(model_type: str) -> None:
    Path("model/evil.py").write_text(EVIL)
    edit("config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, model_type=model_type)
    edit("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.T"]}, tokenizer_class="T")


def write_weights(header: bytes, size: int | None = None, content: bytes = b"") -> None:
    length = struct.pack("<Q", len(header) if size is None else size)
    Path("model/model.safetensors").write_bytes(length + header + content)


def describe_tensors(*tensors: tuple[int, int, int]) -> bytes:
    """A safetensors header; each tensor has a number of floats, and the first and last offset."""
    return json.dumps(
        {f"t{n}": {"dtype": "F32", "shape": [t[0]], "data_offsets": [*t[1:]]} for n, t in enumerate(tensors)}
    ).encode()


MODELS: dict[str, Make] = {
    "code, new type": lambda: name_code("evil"),
    "code, known type": lambda: name_code("gpt2"),
    "template that escapes": lambda: Path("model/chat_template.jinja").write_text(ESCAPE),
    "template without syntax": lambda: Path("model/chat_template.jinja").write_text("{% for %}"),
    "config nested": lambda: Path("model/config.json").write_text('{"a":' + "[" * 100_000),
    "config list": lambda: Path("model/config.json").write_text("[]"),
    "config types": lambda: edit("config.json", n_embd="x", n_head=[]),
    "vocabulary of 10^12": lambda: edit("config.json", vocab_size=10**12),
    "tokenizer nested": lambda: Path("model/tokenizer.json").write_text("[" * 100_000),
    "tokenizer of bytes": lambda: Path("model/tokenizer.json").write_bytes(random.Random(1).randbytes(999)),
    "weights header 2^63": lambda: write_weights(b"{}", 2**63),
    "weights header 2^40": lambda: write_weights(b"{}", 2**40),
    "weights nested": lambda: write_weights(b"[" * 10**6),
    "weights overlapping": lambda: write_weights(describe_tensors((2, 0, 8), (2, 4, 12)), content=bytes(12)),
    "weights of 2^60": lambda: write_weights(describe_tensors((2**60, 0, 8)), content=bytes(8)),
}
CHATS = {
    "nested": '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
    "number of 5000 digits": '{"messages": [{"role": "user", "content":' + "9" * 5000 + "}]}\n",
    "NULs": "\0" * 100_000,
    "half a character": '{"messages":[{"role":"user","content":"\\ud800"},{"role":"assistant","content":"\\ud800"}]}\n',
}


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("language") / "model", "gpt2")


@pytest.fixture
def model(language_model: Path) -> Path:
    shutil.copytree(language_model, "model")
    Path("chats.jsonl").write_text((json.dumps(CHAT) + "\n") * 40)
    return Path("model")


def train_chats() -> Outcome:
    return train("--data", "chats.jsonl", "--model-dir", "model", "--batch-size", "4", gib=12)


@pytest.mark.parametrize("name", MODELS)
def test_hostile_model_runs_no_code(name: str, model: Path) -> None:
    MODELS[name]()
    outcome = train_chats()
    assert outcome.is_clear(), outcome
    assert not Path("owned").exists()


@pytest.mark.parametrize("name", CHATS)
def test_hostile_chats_are_refused(name: str, model: Path) -> None:
    Path("chats.jsonl").write_text(CHATS[name] * 3)
    outcome = train_chats()
    assert outcome.is_clear(), outcome
