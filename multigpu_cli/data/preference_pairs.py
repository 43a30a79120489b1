"""The samples of preferences: a chosen and a rejected answer to one prompt, side by side."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.data.chat_samples import Chats
from multigpu_cli.data.chat_tokens import ChatEncoder, ChatTokens
from multigpu_cli.data.conversations import Conversation
from multigpu_cli.errors import RequestError, pluralize

_SIDES = ("chosen", "rejected")


def encode_pair(encoder: ChatEncoder, conversation: Conversation, place: str) -> tuple[ChatTokens, ChatTokens]:
    """The tokens of both answers with their prompt.

    What is learned begins with the answers, or where tokens differ before: a tokenizer may join the prompt's last
    characters with the first ones of one answer and not of the other.

    Raises:
        RequestError: see `ChatEncoder.encode`; names the answer.
    """
    assert conversation.rejected is not None
    both = (conversation, conversation.rejected)
    chosen, rejected = (encoder.encode(each, f"{place}, {side}") for each, side in zip(both, _SIDES, strict=True))
    alike = zip(chosen.ids, rejected.ids, strict=False)
    first = next((at for at, (one, other) in enumerate(alike) if one != other), len(chosen.ids))
    for tokens in (chosen, rejected):
        begun = tokens.learned.index(True) if True in tokens.learned else 0
        tokens.learned[first:begun] = [True] * max(0, begun - first)
    return chosen, rejected


class Answers(Chats):
    """Both answers of each pair, the chosen one first, as 2n samples of their own; see `Chats` for the arguments."""

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


class Pairs(Dataset[list[dict[str, Tensor]]]):
    """Samples: the chosen and the rejected answer, each as in `Chats`; a batch has them as (n, 2, t)."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self._pad = answers, answers.collate_fn

    def __len__(self) -> int:
        return len(self.answers) // 2

    def __getitem__(self, index: int) -> list[dict[str, Tensor]]:
        return [self.answers[2 * index], self.answers[2 * index + 1]]

    def collate_fn(self, pairs: Sequence[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
        """(n, 2, t) each: all answers filled up to the longest."""
        padded: dict[str, Tensor] = self._pad(list(chain.from_iterable(pairs)))
        return {name: rows.unflatten(0, (-1, 2)) for name, rows in padded.items()}


def check_differences(split: str, pairs: Pairs) -> list[str]:
    """A warning, if there are pairs of which nothing can be learned, since their answers are the same.

    Raises:
        RequestError: all are so.
    """
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
        f"chosen and rejected are the same in {len(same)} of {pluralize(len(pairs), 'pair')} for {split}, of which "
        f"nothing is learned; the first is {first}"
    ]
