"""The samples of conversations: each alone, or several packed into a row."""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.data.chat_tokens import ChatTokens
from multigpu_cli.data.collate import IGNORED
from multigpu_cli.data.epoch_order import epoch_order
from multigpu_cli.data.json_lines import JsonLines
from multigpu_cli.planning.packing import pack_first_fit, pack_windows
from multigpu_cli.planning.rng_keys import make_key

_PACKING = 0x9AC4  # separates the stream of packs from the epochs' orders


class Chats(Dataset[dict[str, Tensor]]):
    """Samples: input_ids, position_ids and labels, (t,) int64 each. All are rendered once, at five bytes per token.

    Labels stand at their own token, and are -100 where a token is not learned, as in Hugging Face's datasets.

    Args:
        records: of the file, for the places in messages.
        rows: which of them are samples.
        encoded: their tokens, in turn.
        limit: tokens of a sample at most; what is beyond is cut off.
        padding: the token that fills up a batch. It is never a label, also where it is EOS.

    Attributes:
        lengths: (n,) tokens of each sample, not cut.
        learned: (n,) how many of them count in the loss.
        noun: what a sample is called in messages.
    """

    noun = "sample"

    def __init__(
        self, records: JsonLines, rows: Sequence[int], encoded: Iterable[ChatTokens], limit: int, padding: int
    ) -> None:
        self.records, self.rows, self.limit = records, list(rows), limit
        self.collate_fn = partial(pad_samples, padding=padding)
        self.lengths: list[int] = []
        self.learned: list[int] = []
        self._tokens: list[np.ndarray] = []  # (t,) int32 each, and (t,) bool
        self._marks: list[np.ndarray] = []
        for tokens in encoded:
            marks = np.array(tokens.learned[:limit], dtype=bool)
            marks[:1] = False  # nothing foretells the first
            self.lengths.append(len(tokens.ids))
            self.learned.append(int(marks.sum()))
            self._tokens.append(np.array(tokens.ids[:limit], dtype=np.int32))
            self._marks.append(marks)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self._tokens[index]).long()
        marks = torch.from_numpy(self._marks[index])
        positions = torch.arange(len(ids))
        return {"input_ids": ids, "position_ids": positions, "labels": torch.where(marks, ids, IGNORED)}

    def describe(self, index: int) -> str:
        """A sample's place, for messages."""
        return self.records.describe(self.rows[index])

    def select(self, chosen: Sequence[int]) -> None:
        """Keep these samples only."""
        self.rows, self.lengths, self.learned = (
            [column[index] for index in chosen] for column in (self.rows, self.lengths, self.learned)
        )
        self._tokens, self._marks = ([column[index] for index in chosen] for column in (self._tokens, self._marks))


class Packs(Dataset[dict[str, Tensor]]):
    """Samples side by side in rows of at most `limit` tokens; position ids begin anew with each.

    The packs of an epoch are a function of seed, epoch and lengths. An epoch always has the same number, so that the
    run's length is known: where an order needs fewer, the last are empty and count for nothing.
    """

    def __init__(self, chats: Chats, seed: int) -> None:
        self.chats, self.limit, self._seed = chats, chats.limit, seed
        self.collate_fn = chats.collate_fn
        self._lengths = [min(length, chats.limit) for length in chats.lengths]
        self._tightest = pack_first_fit(range(len(chats)), self._lengths, self.limit)
        self._epoch = -1
        self._packs: list[list[int]] = []
        self._count = max(len(self._tightest), len(self._pack(0)))
        self.make_packs_of_epoch(0)

    def make_packs_of_epoch(self, epoch: int) -> None:
        """Make the packs of an epoch; called by the loader before it asks for one of its samples."""
        if epoch != self._epoch:
            packs = self._pack(epoch)
            self._packs = packs if len(packs) <= self._count else self._tightest
            self._epoch = epoch

    def _pack(self, epoch: int) -> list[list[int]]:
        order = epoch_order(len(self.chats), make_key(self._seed, _PACKING), epoch).tolist()
        return pack_windows(order, self._lengths, self.limit)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        samples = [self.chats[each] for each in self._packs[index]] if index < len(self._packs) else []
        empty = torch.zeros(0, dtype=torch.int64)
        return {
            name: torch.cat([empty, *(sample[name] for sample in samples)])
            for name in ("input_ids", "position_ids", "labels")
        }


def pad_samples(samples: Sequence[dict[str, Tensor]], *, padding: int) -> dict[str, Tensor]:
    """(n, t) each: samples filled up to the longest. Padding is a text of its own, of which nothing is learned."""
    longest = max(1, *(len(sample["input_ids"]) for sample in samples))
    fill = {"input_ids": torch.full((longest,), padding), "labels": torch.full((longest,), IGNORED)}
    fill["position_ids"] = torch.arange(longest)
    return {
        name: torch.stack([torch.cat([sample[name], fill[name][: longest - len(sample[name])]]) for sample in samples])
        for name in fill
    }
