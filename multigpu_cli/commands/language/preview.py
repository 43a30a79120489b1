"""What a language model learns of a file: the tokens of a few samples, and which of them count in the loss."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TextIO

import torch

from multigpu_cli.config.schema import Config
from multigpu_cli.data.collate import IGNORED
from multigpu_cli.data.load import open_data
from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.samples import Chats
from multigpu_cli.language.text import Vocabulary

_MARKS = "⟦", "⟧"
_GREEN = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class Stretch:
    """Text of which all is learned, or nothing."""

    text: str
    learned: bool


@dataclass(frozen=True)
class PreviewedSample:
    """One sample.

    Attributes:
        place: of its record.
        length: tokens before it is cut.
        learned: how many tokens count in the loss.
        stretches: the text of its tokens, in turn.
    """

    place: str
    length: int
    truncated: bool
    learned: int
    tokens: list[int]
    stretches: list[Stretch]


@dataclass(frozen=True)
class Preview:
    """The first samples for training, each of at most `max_length` tokens, and what is said of all."""

    data: str
    max_length: int
    samples: list[PreviewedSample]


def preview_data(config: Config, count: int) -> Preview:
    """The first samples for training, as a training with these settings gets them; no worker is started."""
    if config.data.name != "chat":
        raise RequestError(
            f"data preview: --data {config.data.name} has no tokens of which some are learned",
            remedy="--data chat --data-dir FILE.jsonl --model-dir DIR",
        )
    source = open_data(config)
    chats, vocabulary = _find_chats(source.train), source.codec
    assert isinstance(vocabulary, Vocabulary)
    shown = range(min(count * chats.width, len(chats)))
    samples = [_show(chats, index, vocabulary) for index in shown]
    return Preview(source.note.removesuffix("; "), chats.limit, samples)


def choose_marks(output: TextIO, environ: Mapping[str, str]) -> tuple[str, str]:
    """What stands before and after learned text: colours in a terminal that may have them, else signs."""
    return _GREEN if output.isatty() and not environ.get("NO_COLOR") else _MARKS


def format_preview(preview: Preview, marks: tuple[str, str]) -> Iterator[str]:
    """Each sample's place, numbers and text; what is learned stands between the marks."""
    yield preview.data
    for sample in preview.samples:
        cut = f", cut to {len(sample.tokens)}" if sample.truncated else ""
        yield f"\n{sample.place}: {sample.length} tokens{cut}, {sample.learned} learned"
        yield "".join(_mark(stretch, marks) for stretch in sample.stretches)


def _find_chats(train: Any) -> Chats:
    """The samples by themselves, of packs or pairs too."""
    found: Chats = getattr(train, "chats", getattr(train, "answers", train))
    return found


def _show(chats: Chats, index: int, vocabulary: Vocabulary) -> PreviewedSample:
    sample = chats[index]
    tokens, learned = sample["input_ids"].tolist(), sample["labels"] != IGNORED
    changes = (torch.nonzero(learned[1:] != learned[:-1]).flatten() + 1).tolist()
    bounds = list(pairwise([0, *changes, len(tokens)]))
    texts = [vocabulary.decode(tokens[:end])[len(vocabulary.decode(tokens[:first])) :] for first, end in bounds]
    stretches = [
        Stretch(_make_printable(text), bool(learned[first])) for text, (first, _) in zip(texts, bounds, strict=True)
    ]
    length = int(chats.lengths[index])
    return PreviewedSample(
        chats.describe(index), length, length > len(tokens), int(chats.learned[index]), tokens, stretches
    )


def _make_printable(text: str) -> str:
    """Text that does nothing to a terminal."""
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


def _mark(stretch: Stretch, marks: tuple[str, str]) -> str:
    return stretch.text.join(marks) if stretch.learned else stretch.text
