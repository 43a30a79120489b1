"""The samples of conversations: each alone, or several packed into a row."""

from array import array
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.data.collate import IGNORED
from multigpu_cli.data.epoch_order import epoch_order
from multigpu_cli.data.json_lines import JsonLines
from multigpu_cli.data.token_file import TokenFile
from multigpu_cli.planning.packing import count_first_fit, pack_first_fit, pack_windows
from multigpu_cli.planning.rng_keys import make_key

_PACKING = 0x9AC4  # separates the stream of packs from the epochs' orders


class Chats(Dataset[dict[str, Tensor]]):
    """Samples: input_ids, position_ids and labels, (t,) int64 each, as they are asked for; tokens lie in a file.

    Labels stand at their own token, and are -100 where a token is not learned, as in Hugging Face's datasets.

    Args:
        records: of the file, for the places in messages.
        tokens: of all records, `width` samples each.
        rows: which of the records are used.
        limit: tokens of a sample at most; what is beyond is cut off.
        padding: the token that fills up a batch. It is never a label, also where it is EOS.

    Attributes:
        lengths: (n,) int32 tokens of each sample, not cut.
        learned: (n,) int32 how many of them count in the loss.
        rows: (n,) int32 the record of each sample.
        noun: what a sample is called in messages.
        width: how many samples stand in a record.
        own_file_because: why the tokens are in a file of this process alone; empty where they are not.
    """

    noun, width = "sample", 1

    def __init__(
        self, records: JsonLines, tokens: TokenFile, rows: Sequence[int] | np.ndarray, limit: int, padding: int
    ) -> None:
        self.records, self.limit = records, limit
        self.collate_fn = partial(pad_samples, padding=padding)
        self._tokens, self.own_file_because = tokens, tokens.own_because
        self.rows = np.repeat(np.asarray(rows, dtype=np.int32), self.width)
        samples = self.rows * self.width + np.arange(len(self.rows)) % self.width
        self.lengths = np.diff(tokens.starts)[samples].astype(np.int32)
        counts = (int(self._read(index)[1].sum()) for index in range(len(self.rows)))
        self.learned = np.fromiter(counts, dtype=np.int32, count=len(self.rows))

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


class Packs(Dataset[dict[str, Tensor]]):
    """Samples side by side in rows of at most `limit` tokens; position ids begin anew with each.

    The packs of an epoch are a function of seed, epoch and lengths. An epoch always has the same number, so that the
    run's length is known: where an order needs fewer, the last are empty and count for nothing.
    """

    def __init__(self, chats: Chats, seed: int) -> None:
        self.chats, self.limit, self._seed = chats, chats.limit, seed
        self.collate_fn = chats.collate_fn
        lengths = np.minimum(chats.lengths, chats.limit)
        self._lengths = array("i", lengths.tobytes())  # numbers of Python: numpy's are slow one by one
        tightest = count_first_fit(array("i", np.sort(lengths)[::-1].tobytes()), self.limit)
        self._epoch = 0
        self._set(self._pack(0))
        self._count = max(tightest, len(self._ends) - 1)

    def make_packs_of_epoch(self, epoch: int) -> None:
        """Make the packs of an epoch; called by the loader before it asks for one of its samples."""
        if epoch != self._epoch:
            self._set(self._pack(epoch))
            if len(self._ends) - 1 > self._count:
                self._set(pack_first_fit(range(len(self.chats)), self._lengths, self.limit))
            self._epoch = epoch

    def _pack(self, epoch: int) -> Iterable[list[int]]:
        order = epoch_order(len(self.chats), make_key(self._seed, _PACKING), epoch)
        return pack_windows(array("q", order.numpy().tobytes()), self._lengths, self.limit)

    def _set(self, packs: Iterable[list[int]]) -> None:
        self._samples, self._ends = array("i"), array("i", [0])  # of all packs in turn, and where each ends
        for pack in packs:
            self._samples.extend(pack)
            self._ends.append(len(self._samples))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, end = (self._ends[min(each, len(self._ends) - 1)] for each in (index, index + 1))
        samples = [self.chats[each] for each in self._samples[first:end]]
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
