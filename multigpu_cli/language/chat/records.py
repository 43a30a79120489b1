"""Tokens of samples in a file that is mapped into memory: made once on a machine, for all its ranks and later runs."""

import fcntl
import hashlib
import mmap
import os
import stat
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from multigpu_cli.checkpoint.files import sign_cache, take_lock
from multigpu_cli.config.regular_files import open_regular
from multigpu_cli.distributed.processes import say_before_run
from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.encoder import ChatTokens

_UNUSED = {".tokens": 30 * 24 * 3600.0, ".lock": 30 * 24 * 3600.0, ".draft": 24 * 3600.0}  # seconds, then it is removed
_SUM = 64  # bytes of the checksum, as text
_PIECE = 4096  # samples that are counted at once
_PATIENCE = 5.0  # seconds of silent waiting for another process

Encode = Callable[[int], Sequence[ChatTokens]]  # a record's number → the tokens of its samples


class TokenFile:
    """Tokens of samples, and whether each is learned.

    The file: the place of each sample's first token, and the number of all, (n + 1,) int64; then the tokens, int32;
    then a checksum. A token that is learned is stored as its complement, which is negative. `own_because` says why no
    other process reads the file; it is empty if others do. The file may be closed afterwards. ValueError: it is
    incomplete.
    """

    def __init__(self, file: BinaryIO, count: int) -> None:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        head = 8 * (count + 1)
        self.starts = mapped[:head].view(np.int64)
        if len(self.starts) != count + 1 or len(mapped) != head + 4 * self.starts[-1] + _SUM:
            raise ValueError("it is incomplete")
        self._tokens = mapped[head:-_SUM].view(np.int32)
        self._sum = mapped[-_SUM:].tobytes().decode(errors="replace")
        self.own_because = ""

    def check(self) -> None:
        """Raise ValueError if the content is not what its checksum is of, because that would be trained on."""
        digest = hashlib.sha256(self._tokens.data)
        digest.update(self.starts.data)
        if sign_cache(digest, len(self.starts)) != self._sum:
            raise ValueError("it is damaged")

    def read(self, index: int, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (t,) int32 of a sample, and which are learned (t,) bool; at most `limit`."""
        stored = self._tokens[self.starts[index] : self.starts[index + 1]][:limit]
        learned = stored < 0
        return np.where(learned, ~stored, stored), learned

    def count_learned(self, limit: int) -> np.ndarray:
        """(n,) int32: how many of each sample's first `limit` tokens are learned, but for the first of all."""
        counts = []
        for first in range(0, len(self.starts), _PIECE):
            starts = self.starts[first : first + _PIECE + 1] - self.starts[first]
            sums = np.cumsum(self._tokens[self.starts[first] :][: starts[-1]] < 0, dtype=np.int32)
            ends = np.minimum(starts[1:], starts[:-1] + limit)
            sums = np.insert(sums, 0, 0)
            counts.append(sums[ends] - sums[np.minimum(starts[:-1] + 1, ends)])
        return np.concatenate(counts)


def open_tokens(folder: Path, key: str, count: int, encode: Encode, width: int = 1) -> TokenFile:
    """The tokens that an earlier process has left, or else those that `encode` makes now.

    Processes that ask for the same at once wait for the first of them. Where the folder can't be written, or others can
    write into it too, each process has a file of its own, which ends with it. The folder is of such files, for all
    programs of this user; what was not used for 30 days is removed. The key is of all that the tokens depend on;
    `count` and `width` are the records, and the samples of each.
    """
    reason = ""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            with _locked(folder / f"{key}.lock"):
                found = _find(folder / f"{key}.tokens", count, encode, width)
                return found or _make(folder, key, count, encode, width)
        reason = "others can write into it"  # and their tokens would be trained on
    except OSError as error:  # read-only, full, or without locks
        reason = error.strerror or str(error)
    try:
        with tempfile.TemporaryFile() as file:
            _write(file, count, encode, width)
            tokens = TokenFile(file, count * width)
    except OSError as error:
        raise RequestError(
            f"--data chat: the tokens can be stored neither in {folder} ({reason}) nor in {tempfile.gettempdir()} "
            f"({error.strerror or error})",
            remedy="room in one of them (HF_HOME and TMPDIR say where they are): about as much as the data takes",
        ) from error
    tokens.own_because = f"tokens in a temporary file of each process, since {folder} is not used: {reason}"
    return tokens


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds it. It only saves work: files appear whole, whoever writes them."""
    with path.open("a") as file:
        os.utime(path)
        deadline = time.monotonic() + _PATIENCE
        if not take_lock(file, lambda: time.monotonic() > deadline):
            say_before_run(f"waiting for another process, which encodes the same data: it holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _encode(encode: Encode, record: int) -> Sequence[ChatTokens]:
    """The tokens of a record's samples; where a record can't be read, the file that is written is not at fault."""
    try:
        return encode(record)
    except OSError as error:
        remedy = "the data and the model's folder where they were when the command began"
        raise RequestError(f"--data chat: record {record + 1} can't be read: {error}", remedy=remedy) from error


def _find(path: Path, count: int, encode: Encode, width: int) -> TokenFile | None:
    """Return a file that exists and is undamaged, if its first, middle and last record are as `encode` makes them."""
    try:
        with open_regular(path) as file:
            found = TokenFile(file, count * width)
        found.check()
        for record in {0, count // 2, count - 1}:
            for index, sample in enumerate(_encode(encode, record), record * width):
                ids, learned = found.read(index)
                if (ids.tolist(), learned.tolist()) != tuple(sample):
                    raise ValueError("it holds the tokens of other samples")
    except FileNotFoundError:
        return None
    except ValueError as problem:
        say_before_run(f"the tokens in {path} are not used, since {problem}: they are made again")
        return None
    os.utime(path)
    return found


def _make(folder: Path, key: str, count: int, encode: Encode, width: int) -> TokenFile:
    _remove_unused(folder)
    number, name = tempfile.mkstemp(prefix=f"{key}.", suffix=".draft", dir=folder)
    draft = Path(name)
    try:
        with open(number, "r+b") as file:
            _write(file, count, encode, width)
            draft.replace(folder / f"{key}.tokens")
            return TokenFile(file, count * width)
    finally:
        draft.unlink(missing_ok=True)


def _write(file: BinaryIO, count: int, encode: Encode, width: int) -> None:
    starts, digest = array("q", [0]), hashlib.sha256()
    file.seek(8 * (count * width + 1))
    for record in range(count):
        for ids, learned in _encode(encode, record):
            tokens = np.array(ids, dtype=np.int32)
            content = np.where(np.array(learned, dtype=bool), ~tokens, tokens).tobytes()
            digest.update(content)
            file.write(content)
            starts.append(starts[-1] + len(ids))
    digest.update(starts.tobytes())
    file.write(sign_cache(digest, len(starts)).encode())
    file.seek(0)  # last: without it the file is incomplete
    file.write(starts.tobytes())
    file.flush()
    os.fsync(file.fileno())


def _remove_unused(folder: Path) -> None:
    now = time.time()
    for path in folder.iterdir():
        with suppress(OSError):  # another process was faster
            if now - path.stat().st_mtime > _UNUSED.get(path.suffix, now):
                path.unlink()
