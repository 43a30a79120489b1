"""The samples of conversations: each alone, pairs of answers, or several packed into a row."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.data.files import Records
from multigpu_cli.data.order import shuffle_numbers
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.language.chat.conversations import Conversation, count_same
from multigpu_cli.language.chat.encoder import ChatEncoder, ChatTokens
from multigpu_cli.language.chat.records import TokenFile
from multigpu_cli.planning.batch import make_key
from multigpu_cli.runtime.model_call import IGNORED

_PACKING = 0x9AC4  # separates the stream of packs from the epochs' orders

TextRow = dict[str, Tensor]  # input_ids, position_ids and labels, (t,) int64 each

Packs = tuple[np.ndarray, np.ndarray]
"""The samples of all packs in turn, (n,), and (packs + 1,) where each begins and the last ends."""


class SFTDataset(Dataset[dict[str, Tensor]]):
    """Samples: input_ids, position_ids and labels, (t,) int64 each, as they are asked for; tokens lie in a file.

    Labels stand at their own token, and are -100 where a token is not learned, as in Hugging Face's datasets.

    Args:
        rows: which of the records are used.
        limit: tokens of a sample at most; what is beyond is cut off.
        padding: the token that fills up a batch. It is never a label, also where it is EOS.
    """

    noun, width = "sample", 1  # what a sample is called in messages, and how many stand in a record

    def __init__(
        self, records: Records, tokens: TokenFile, rows: Sequence[int] | np.ndarray, limit: int, padding: int
    ) -> None:
        self.records, self.limit = records, limit
        self.collate_fn = partial(pad_samples, padding=padding)
        self._tokens, self.own_file_because = tokens, tokens.own_because
        self.rows = np.repeat(np.asarray(rows, dtype=np.int32), self.width)  # (n,) int32, the record of each sample
        samples = self.rows * self.width + np.arange(len(self.rows)) % self.width
        self.lengths = np.diff(tokens.starts)[samples].astype(np.int32)  # (n,) tokens of each sample, not cut
        self.learned = tokens.count_learned(limit)[samples]  # (n,) int32, how many of them count in the loss

    def _read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids, learned = self._tokens.read(self.rows[index] * self.width + index % self.width, self.limit)
        learned[:1] = False  # nothing foretells the first
        return ids, learned

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, learned = self._read(index)
        ids = torch.from_numpy(tokens).long()
        labels = torch.where(torch.from_numpy(learned), ids, IGNORED)
        return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "labels": labels}

    def describe(self, index: int) -> str:
        """A sample's place, for messages."""
        return self.records.describe(self.rows[index])

    def select(self, chosen: np.ndarray) -> None:
        """Keep these samples only."""
        self.rows, self.lengths, self.learned = self.rows[chosen], self.lengths[chosen], self.learned[chosen]


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Samples side by side in rows of at most `limit` tokens; position ids begin anew with each.

    The packs of an epoch are a function of seed, epoch and lengths. An epoch always has the same number, so that the
    run's length is known: where an order needs fewer, the last are empty and count for nothing.
    """

    def __init__(self, chats: SFTDataset, seed: int) -> None:
        self.chats, self.limit, self._seed = chats, chats.limit, seed
        self.collate_fn = chats.collate_fn
        self._lengths = np.minimum(chats.lengths, chats.limit)
        self._epoch = 0
        self._samples, self._ends = self._pack(0)
        self._count = max(len(pack_first_fit(self._lengths, self.limit)[1]), len(self._ends)) - 1

    def make_packs_of_epoch(self, epoch: int) -> None:
        """Make the packs of an epoch; called by the loader before it asks for one of its samples."""
        if epoch != self._epoch:
            self._samples, self._ends = self._pack(epoch)
            if len(self._ends) - 1 > self._count:
                self._samples, self._ends = pack_first_fit(self._lengths, self.limit)
            self._epoch = epoch

    def _pack(self, epoch: int) -> Packs:
        order = shuffle_numbers(len(self.chats), make_key(self._seed, _PACKING), epoch)
        return pack_windows(order.numpy(), self._lengths, self.limit)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, end = (self._ends[min(each, len(self._ends) - 1)] for each in (index, index + 1))
        samples = [self.chats[each] for each in self._samples[first:end].tolist()]
        empty = torch.zeros(0, dtype=torch.int64)
        return {
            name: torch.cat([empty, *(sample[name] for sample in samples)])
            for name in ("input_ids", "position_ids", "labels")
        }


def pad_samples(samples: Sequence[TextRow], *, padding: int, multiple: int = 1, limit: int = 0) -> TextRow:
    """Fill samples up to the longest one, or to a multiple of a length that a limit cuts; returns (n, t) each.

    Padding is a text of its own, of which nothing is learned.
    """
    longest = max(1, *(len(sample["input_ids"]) for sample in samples))
    longest = max(longest, min(limit, -(-longest // multiple) * multiple))
    fill = {"input_ids": torch.full((longest,), padding), "labels": torch.full((longest,), IGNORED)}
    fill["position_ids"] = torch.arange(longest)
    return {
        name: torch.stack([torch.cat([sample[name], fill[name][: longest - len(sample[name])]]) for sample in samples])
        for name in fill
    }


_SIDES = ("chosen", "rejected")


def encode_pair(encoder: ChatEncoder, conversation: Conversation, place: str) -> tuple[ChatTokens, ChatTokens]:
    """The tokens of both answers with their prompt.

    What is learned begins with the answers, or where tokens differ before: a tokenizer may join the prompt's last
    characters with the first ones of one answer and not of the other.
    """
    assert conversation.rejected is not None
    both = (conversation, conversation.rejected)
    chosen, rejected = (encoder.encode(each, f"{place}, {side}") for each, side in zip(both, _SIDES, strict=True))
    first = count_same(chosen.ids, rejected.ids)
    for tokens in (chosen, rejected):
        begun = tokens.learned.index(True) if True in tokens.learned else 0
        tokens.learned[first:begun] = [True] * max(0, begun - first)
    return chosen, rejected


class AnswerDataset(SFTDataset):
    """Both answers of each pair, the chosen one first, as 2n samples of their own; arguments as of `SFTDataset`."""

    noun, width = "answer", len(_SIDES)

    def describe(self, index: int) -> str:
        return f"{super().describe(index)}, {_SIDES[index % 2]}"

    def select(self, chosen: np.ndarray) -> None:
        """Keep the pairs of which both answers are among these."""
        super().select(chosen[np.isin(chosen ^ 1, chosen)])

    def are_same(self, pair: int) -> bool:
        """Whether both answers of a pair have the same tokens, as far as they are used."""
        first = 2 * pair
        one, other = (min(int(length), self.limit) for length in self.lengths[first : first + 2])
        return one == other and bool(np.array_equal(self._read(first)[0], self._read(first + 1)[0]))


class PreferenceDataset(Dataset[list[dict[str, Tensor]]]):
    """Samples: the chosen and the rejected answer, each as in `SFTDataset`; a batch has them as (n, 2, t)."""

    def __init__(self, answers: AnswerDataset) -> None:
        self.answers, self._pad = answers, answers.collate_fn

    def __len__(self) -> int:
        return len(self.answers) // 2

    def __getitem__(self, index: int) -> list[dict[str, Tensor]]:
        return [self.answers[2 * index], self.answers[2 * index + 1]]

    def collate_fn(self, pairs: Sequence[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
        """(n, 2, t) each: all answers filled up to the longest."""
        padded: dict[str, Tensor] = self._pad(list(chain.from_iterable(pairs)))
        return {name: rows.unflatten(0, (-1, 2)) for name, rows in padded.items()}


def check_differences(split: str, pairs: PreferenceDataset) -> list[str]:
    """A warning, if the answers of some pairs are the same, which teach nothing; RequestError where all are."""
    same = [index for index in range(len(pairs)) if pairs.answers.are_same(index)]
    if not same:
        return []
    first = pairs.answers.records.describe(pairs.answers.rows[2 * same[0]])
    if len(same) == len(pairs):
        raise RequestError(
            f"--data chat: of {pluralize(len(pairs), 'pair')} for {split}, chosen and rejected are the same in each; "
            f"the first is {first}",
            remedy="answers that differ within --max-length",
        )
    return [
        f"chosen and rejected are the same in {len(same)} of {pluralize(len(pairs), 'pair')} for {split}, which "
        f"train nothing; the first is {first}"
    ]


WINDOW = 1024  # samples that are packed among themselves, so that an epoch's packs follow the epoch's order
_AT_ONCE = 128  # windows, whose packs fit into a processor's cache


def pack_windows(order: np.ndarray, lengths: np.ndarray, capacity: int, window: int = WINDOW) -> Packs:
    """Each window of an order packed by itself, as by `pack_first_fit`: of all windows the longest, then the next."""
    ranked, packs = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=np.int64)
    width = min(window, len(order))
    for first in range(0, len(order), _AT_ONCE * width):
        part = slice(first, min(first + _AT_ONCE * width, len(order)))
        size = part.stop - first
        tokens = np.zeros((-(-size // width), width), dtype=np.int32)  # the last window is filled up with nothing
        tokens.flat[:size] = lengths[order[part]]
        by_length = np.argsort(-tokens, axis=1, kind="stable")
        rows, places, opened = np.arange(len(tokens)), np.empty_like(by_length), 1
        room = np.full(tokens.shape, capacity, dtype=np.int32)
        for at, chosen in enumerate(by_length.T):
            length = tokens[rows, chosen]
            places[:, at] = place = (room[:, :opened] >= length[:, None]).argmax(1)
            room[rows, place] -= length
            opened = max(opened, int(place.max()) + 2)
        begins = first + width * rows[:, None]
        ranked[part], packs[part] = (by_length + begins).flat[:size], (places + begins).flat[:size]
    return _gather(order[ranked], packs)


def pack_first_fit(lengths: np.ndarray, capacity: int) -> Packs:
    """First-fit decreasing (Johnson 1973): the longest first, each into the first pack that has room for it.

    At most 11/9 of the fewest packs possible, plus one. Samples of one length stay in their order, and are placed
    together. Lengths are (n,), each from 1 to the capacity.
    """
    values, counts = np.unique(lengths, return_counts=True)
    room, opened = np.full(len(lengths), capacity, dtype=np.int32), 0
    found = []
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        new = -(-count // (capacity // length))
        fits = np.flatnonzero(room[: opened + new] >= length)[:count]
        free = room[fits] // length
        taken = np.clip(count - (free.cumsum() - free), 0, free)
        room[fits] -= taken * length
        packs = np.repeat(fits, taken)
        opened = max(opened, int(packs[-1]) + 1)
        found.append(packs)
    return _gather(np.argsort(-lengths, kind="stable"), np.concatenate(found))


def _gather(samples: np.ndarray, packs: np.ndarray) -> Packs:
    """Samples by the number of their pack, in the order in which they were placed."""
    sizes = np.unique(packs, return_counts=True)[1]
    return samples[np.argsort(packs, kind="stable")].astype(np.int32), np.append(0, sizes.cumsum())
