"""Vocabularies: text to tokens and back."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from multigpu_cli.errors import RequestError

_UNICODE = 0x110000


class Vocabulary(Protocol):
    """Converts text to tokens and back."""

    size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def serialize(self) -> str:
        """The vocabulary as text, for `deserialize_vocabulary`."""
        ...


class Characters:
    """One token per distinct character, in the order of code points.

    Args:
        symbols: (size,) uint32 code points, ascending.
    """

    def __init__(self, symbols: np.ndarray) -> None:
        self.symbols, self.size = symbols, len(symbols)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            RequestError: a character that is not in the vocabulary.
        """
        own = {chr(symbol): token for token, symbol in enumerate(self.symbols.tolist())}
        if unknown := sorted(set(text) - own.keys()):
            raise RequestError(
                f"the characters {', '.join(map(repr, unknown[:5]))} are not among those the model was trained on",
                remedy=f"use only these: {''.join(own)!r}",
            )
        return [own[character] for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(self.symbols[token]) for token in tokens)

    def serialize(self) -> str:
        return "characters:" + "".join(map(chr, self.symbols.tolist()))


class Bytes:
    """One token per byte of UTF-8."""

    size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def serialize(self) -> str:
        return "bytes:"


class Numbers:
    """Tokens of an external tokenizer; as text they are numbers separated by spaces."""

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            RequestError: a word that is not a number, or that is beyond the vocabulary.
        """
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


class Subwords:
    """Tokens of a tokenizer of the tokenizers library, by its JSON text."""

    def __init__(self, serialized: str) -> None:
        from tokenizers import Tokenizer  # late: of transformers' models only

        self._tokenizer = Tokenizer.from_str(serialized)
        self.size = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

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
