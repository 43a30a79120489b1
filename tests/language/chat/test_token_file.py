import fcntl
import json
import os
import resource
import subprocess
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat import records
from multigpu_cli.language.chat.encoder import ChatTokens
from multigpu_cli.language.chat.records import TokenFile, open_tokens
from tests.conftest import ROOT
from tests.support.fork import exit_code
from tests.support.tiny_language_models import make_model_folder

COUNT = 50


def encode(index: int, log: Path | None = None) -> list[ChatTokens]:
    """`index` tokens, of which every third is learned; a zero among them."""
    if log is not None:
        with log.open("a") as file:
            file.write(f"{index}\n")
    return [ChatTokens(list(range(index)), [token % 3 == 0 for token in range(index)])]


def check(tokens: TokenFile) -> None:
    for index in range(COUNT):
        ids, learned = tokens.read(index)
        assert (ids.tolist(), learned.tolist()) == tuple(encode(index)[0])
    assert tokens.read(9, limit=4)[0].tolist() == [0, 1, 2, 3]


def test_processes_that_ask_at_once_encode_each_sample_once(tmp_path: Path) -> None:
    def ask(log: Path) -> None:
        check(open_tokens(tmp_path / "cache", "key", COUNT, partial(encode, log=log)))

    logs = [tmp_path / f"{process}.log" for process in range(3)]
    children = [get_context("fork").Process(target=ask, args=(log,)) for log in logs]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    lines = [len(log.read_text().splitlines()) for log in logs]
    assert sorted(lines) == [3, 3, COUNT], "the others look at three samples only"
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0, "the texts are the user's"


def test_a_file_that_is_cut_or_holds_other_tokens_is_made_anew(tmp_path: Path) -> None:
    open_tokens(tmp_path, "key", COUNT, encode)
    path, log = tmp_path / "key.tokens", tmp_path / "log"
    whole = path.read_bytes()
    for content in (whole[:-4], whole[:100], b"", whole[:-4] + b"\0\0\0\0"):
        path.write_bytes(content)
        check(open_tokens(tmp_path, "key", COUNT, partial(encode, log=log)))
        assert path.read_bytes() == whole
    assert len(log.read_text().splitlines()) >= 4 * COUNT


@pytest.mark.parametrize("at", [0, 9, -70, -64, -1])
def test_tokens_with_any_flipped_bit_are_named_and_made_again(
    at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_tokens(tmp_path, "key", COUNT, encode)
    path = tmp_path / "key.tokens"
    content = bytearray(intact := path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    check(open_tokens(tmp_path, "key", COUNT, encode))
    assert f"the tokens in {path} are not used" in caplog.text
    assert path.read_bytes() == intact


def test_tokens_behind_a_link_are_made_again(tmp_path: Path) -> None:
    open_tokens(tmp_path, "key", COUNT, encode)
    path = tmp_path / "key.tokens"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    tokens = open_tokens(tmp_path, "key", COUNT, encode)
    check(tokens)


def test_where_the_folder_cant_be_written_each_process_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tokens = open_tokens(tmp_path / "file" / "cache", "key", COUNT, encode)
    check(tokens)
    assert tokens.own_because.endswith("cache is not used: Not a directory")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_others_may_have_put_there_is_not_read(tmp_path: Path) -> None:
    open_tokens(tmp_path, "key", COUNT, lambda index: encode(index if index in (0, COUNT // 2, COUNT - 1) else 1))
    tmp_path.chmod(0o777)
    tokens = open_tokens(tmp_path, "key", COUNT, encode)
    check(tokens)
    assert tokens.own_because.endswith(f"{tmp_path} is not used: others can write into it")


def test_a_record_that_cant_be_read_is_no_full_disk(tmp_path: Path) -> None:
    def fail(index: int) -> list[ChatTokens]:
        if index == 7:
            raise FileNotFoundError(2, "No such file or directory", "talks.jsonl")
        return encode(index)

    with pytest.raises(RequestError, match=r"record 8 can't be read: .*talks\.jsonl") as raised:
        open_tokens(tmp_path, "key", COUNT, fail)
    assert "HF_HOME" not in str(raised.value)


def test_waiting_for_another_process_is_said_once_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(records, "_PATIENCE", 0.1)
    with (tmp_path / "key.lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = Thread(target=open_tokens, args=(tmp_path, "key", COUNT, encode))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()
    assert caplog.messages == [
        f"waiting for another process, which encodes the same data: it holds {tmp_path / 'key.lock'}"
    ]
    caplog.clear()
    monkeypatch.setattr(records, "_PATIENCE", 60.0)
    check(open_tokens(tmp_path, "key", COUNT, encode))
    assert not caplog.messages


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    def ask() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000,) * 2)
        with pytest.raises(RequestError, match=rf"neither in {tmp_path} \(File too large\) nor in") as raised:
            open_tokens(tmp_path, "key", COUNT, encode)
        assert "HF_HOME" in str(raised.value.remedy)

    assert exit_code(ask) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_what_was_not_used_for_long_is_removed(tmp_path: Path) -> None:
    for name in ("old.tokens", "old.lock", "old.draft", "notes.txt"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    open_tokens(tmp_path, "key", COUNT, encode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.lock", "key.tokens", "notes.txt"]


MEASURE = """
import ctypes, re
from pathlib import Path
from multigpu_cli.config.schema import DataConfig, ModelConfig
from multigpu_cli.data.load import load_data_source

def measure(file):
    source = load_data_source(DataConfig(name="chat", dir=file), 42, model=ModelConfig(dir="model"))
    ctypes.CDLL(None).malloc_trim(0)  # what is free does not count, though the allocator keeps it for later
    return source, 1024 * int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

_, before = measure("few.jsonl")
source, after = measure("many.jsonl")
print(after - before, len(source.train.chats))
"""


@pytest.mark.slow
def test_memory_grows_by_a_few_numbers_a_sample(tmp_path: Path) -> None:
    """100 tokens each, of which 5 bytes each would be 500; the first pass and a later one."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    make_model_folder(tmp_path / "model", places=256)
    for name, count in (("few", 1000), ("many", 60_000)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": f"{n} 5 7" * 20}) + "\n" for n in range(count))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support/site", "HF_HOME": str(tmp_path / "cache")}
    for _ in ("first", "later"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        grown, samples = map(int, done.stdout.split()[-2:])
        assert samples == 57_000
        assert grown < 150 * samples
