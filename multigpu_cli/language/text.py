"""Text as windows of tokens: the characters or bytes of a file, or arrays that somebody else made; and vocabularies.

Nothing is copied into memory that the file system can serve: bytes and arrays are memory-mapped.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.config.types import choice, integer, number
from multigpu_cli.data.files import locate_single_file
from multigpu_cli.data.source import SPLITS, Codec, DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.model_call import IGNORED

_UNICODE = 0x110000
_LAYOUT = "one .txt file, or arrays of tokens: train.bin and val.bin (uint16, as nanoGPT writes them) or .npy"


class Vocabulary(Codec, ABC):
    """Converts text to tokens and back; its text is for `deserialize_vocabulary`."""

    size: int

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str: ...


class Characters(Vocabulary):
    """One token per distinct character, in the order of code points: `symbols` (size,) uint32, ascending."""

    def __init__(self, symbols: np.ndarray) -> None:
        self.symbols, self.size = symbols, len(symbols)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; RequestError for a character that is not in the vocabulary."""
        own = {chr(symbol): token for token, symbol in enumerate(self.symbols.tolist())}
        if unknown := sorted(set(text) - own.keys()):
            problem = f"the characters {', '.join(map(repr, unknown[:5]))} are not among those the model was trained on"
            raise RequestError(problem, remedy=f"use only these: {''.join(own)!r}")
        return [own[character] for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(self.symbols[token]) for token in tokens)

    def serialize(self) -> str:
        return "characters:" + "".join(map(chr, self.symbols.tolist()))


class Bytes(Vocabulary):
    """One token per byte of UTF-8."""

    size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def serialize(self) -> str:
        return "bytes:"


class Numbers(Vocabulary):
    """Tokens of an external tokenizer; as text they are numbers separated by spaces."""

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; RequestError for a word that is not a number, or that is beyond the vocabulary."""
        words = text.split()
        if wrong := [word for word in words if not word.isdecimal() or int(word) >= self.size]:
            raise RequestError(
                f"{wrong[0]!r} is not a token: the data contains numbers from 0 to {self.size - 1}",
                remedy="give tokens as numbers separated by spaces, as the tokenizer returns them",
            )
        return [int(word) for word in words]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def serialize(self) -> str:
        return f"numbers:{self.size}"


class Subwords(Vocabulary):
    """Tokens of a tokenizer of the tokenizers library, by its JSON text."""

    def __init__(self, serialized: str, record: Mapping[str, str] = Vocabulary.record) -> None:
        from tokenizers import Tokenizer  # late: of transformers' models only

        self.record = record
        self._tokenizer = Tokenizer.from_str(serialized)
        self.size = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def serialize(self) -> str:
        return f"subwords:{self._tokenizer.to_str()}"


def deserialize_vocabulary(serialized: str) -> Vocabulary:
    """The inverse of `Vocabulary.serialize`."""
    kind, _, text = serialized.partition(":")
    if kind == "characters":
        return Characters(np.array([ord(character) for character in text], dtype=np.uint32))
    if kind == "subwords":
        return Subwords(text)
    return Bytes() if kind == "bytes" else Numbers(int(text))


def build_characters(text: str) -> tuple[Characters, np.ndarray]:
    """The vocabulary of a text, and the text as tokens: (len(text),) uint16 or uint32."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    there = np.zeros(_UNICODE, dtype=bool)
    there[codes] = True
    symbols = np.flatnonzero(there).astype(np.uint32)
    numbers = np.zeros(_UNICODE, dtype=np.uint16 if len(symbols) <= 1 << 16 else np.uint32)
    numbers[symbols] = np.arange(len(symbols))
    return Characters(symbols), numbers[codes]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Inputs (block,) int64 and targets (block,) int64: the tokens that follow each of them.

    A window that moves starts anywhere in its own stretch of the text, which the loader's seed for (seed, epoch,
    sample) decides: an epoch covers all of the text about once, each time cut elsewhere. Windows that stand still lie
    end to end and hold each token as a target once; targets beyond the end are -100.

    Args:
        tokens: (n,) whole numbers, at least two.
        block: length of a window; a moving one needs block + 1 tokens.
        count: windows in an epoch (default: as many as cover the text).
    """

    def __init__(
        self, tokens: np.ndarray, block: int, vocabulary: int, *, moving: bool, count: int | None = None
    ) -> None:
        self.tokens, self.block, self.vocabulary, self.moving = tokens, block, vocabulary, moving
        self.starts = len(tokens) - block  # of windows with a target for each input
        self.count = count or -(-(len(tokens) - 1) // block)
        if moving:
            self.count = min(self.count, self.starts)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block
        if self.moving:
            low, high = (self.starts * at // self.count for at in (index, index + 1))
            start = int(torch.randint(low, high, ()))
        piece = torch.from_numpy(self.tokens[start : start + self.block + 1].astype(np.int64))
        if (most := int(piece.max())) >= self.vocabulary:
            problem = f"--data text: token {most} near place {start} is beyond the vocabulary of {self.vocabulary}"
            raise RequestError(problem, remedy="a larger data.args.vocabulary, or the right data.args.dtype")
        inputs, targets = torch.zeros(self.block, dtype=torch.int64), torch.full((self.block,), IGNORED)
        inputs[: len(piece) - 1], targets[: len(piece) - 1] = piece[:-1], piece[1:]
        return inputs, targets


def load(
    data_dir: str | None,
    file: str | None = None,
    tokens: Annotated[str | None, choice("characters", "bytes", "arrays")] = None,
    block: Annotated[int, integer(1)] = 128,
    val: Annotated[float, number(0, 1, below=True)] = 0.1,
    windows: Annotated[int | None, integer(1)] = None,
    vocabulary: Annotated[int | None, integer(2)] = None,
    dtype: str = "uint16",
) -> DataSource:
    """A text, cut into windows; the last part of it is for validation.

    Args:
        data_dir: the file or its folder, or that of train.bin and val.bin (also test.bin, and .npy in their place).
        file: name of the text file in it, where there are several.
        tokens: characters, bytes, or arrays (default: arrays where there is a train.bin or train.npy, else characters).
        block: tokens that the model sees at once.
        val: share for validation, at the end; without effect where there is a val.bin.
        windows: samples in an epoch (default: as many as cover the training text).
        vocabulary: how many tokens an array knows (default: the largest in it, plus one).
        dtype: number format of .bin files.
    """
    arrays = _arrays(Path(data_dir).expanduser(), dtype) if data_dir and tokens in (None, "arrays") and not file else {}
    known: Vocabulary
    if arrays:
        known = Numbers(vocabulary or 1 + max(int(array.max()) for array in arrays.values()))
    elif data_dir and tokens == "arrays":
        raise RequestError(f"--data text: {data_dir} holds no train.bin or train.npy", remedy=_LAYOUT)
    else:
        known, whole = _text(locate_single_file("text", data_dir, file, _LAYOUT), tokens or "characters")
        arrays = {"train": whole}
    if "val" not in arrays and val > 0:
        cut = int(len(arrays["train"]) * (1 - val))
        arrays |= {"train": arrays["train"][:cut], "val": arrays["train"][cut:]}
    for split, array in arrays.items():
        if len(array) < block + 1:
            raise RequestError(
                f"--data text: {len(array)} tokens for {split} are less than one window of {block} and its targets",
                remedy="more text, or a smaller data.args.block",
            )
    held_out = {name: Windows(array, block, known.size, moving=False) for name, array in arrays.items()}
    return DataSource(
        train=Windows(arrays["train"], block, known.size, moving=True, count=windows),
        val=held_out.get("val"),
        test=held_out.get("test"),
        input_shape=(block,),
        num_classes=known.size,
        codec=known,
        model="gpt",
        task="language-model",
    )


def _arrays(folder: Path, dtype: str) -> dict[str, np.ndarray]:
    """The token arrays that lie in a folder, memory-mapped; none without one for training."""
    found: dict[str, np.ndarray] = {}
    for split in SPLITS:
        try:
            if (path := folder / f"{split}.npy").is_file():
                found[split] = np.load(path, mmap_mode="r")
            elif (path := folder / f"{split}.bin").is_file():
                found[split] = np.memmap(path, dtype=np.dtype(dtype), mode="r")
        except (ValueError, TypeError, OSError) as error:
            raise RequestError(f"--data text: {path}: {error}", remedy="data.args.dtype, or write it anew") from error
        if split in found and (found[split].ndim != 1 or found[split].dtype.kind not in "ui"):
            raise RequestError(f"--data text: {path} holds {found[split].dtype} {found[split].shape}, not (n,) tokens")
    return found if "train" in found else {}


def _text(path: Path, tokens: str) -> tuple[Vocabulary, np.ndarray]:
    if path.stat().st_size == 0:
        raise RequestError(f"--data text: {path} is empty")
    if tokens == "bytes":
        return Bytes(), np.memmap(path, dtype=np.uint8, mode="r")
    try:
        return build_characters(path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise RequestError(
            f"--data text: {path} is not UTF-8 (byte {error.start})", remedy="--set data.args.tokens=bytes"
        ) from error
