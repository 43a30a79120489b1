"""What is checked of conversations before training: lengths, what is learned, how it ends."""

from typing import Any

import numpy as np

from multigpu_cli.data.chat_samples import Chats
from multigpu_cli.data.collate import IGNORED
from multigpu_cli.errors import RequestError, pluralize


def check_samples(split: str, chats: Chats, overlong: str, learns: str, ends: tuple[int, ...], tokenizer: Any) -> str:
    """Drop or cut what is too long, and check the rest; returns a note about it.

    Args:
        overlong: stop, drop or truncate.
        learns: what is learned, for messages.
        ends: the tokens at which generation stops.

    Raises:
        RequestError: samples that are too long, of which nothing is learned, or which never end.
    """
    note = _apply_length_limit(split, chats, overlong)
    _check_learned(chats, learns)
    _check_ends(chats, ends, tokenizer)
    return note


def _apply_length_limit(split: str, chats: Chats, overlong: str) -> str:
    """Drop or cut what is too long, and say so.

    Raises:
        RequestError: data.args.overlong=stop, or nothing is left.
    """
    beyond = int((chats.lengths > chats.limit).sum())
    if not beyond:
        return ""
    longest = int(chats.lengths.argmax())
    if overlong == "stop":
        raise RequestError(
            f"--max-length {chats.limit}: {beyond} of {pluralize(len(chats), chats.noun)} for {split} are longer, "
            f"the longest has {chats.lengths[longest]} tokens ({chats.describe(longest)})",
            remedy="--set data.args.overlong=drop or truncate; or, if the model knows as many places, "
            f"--max-length {chats.lengths[longest]}",
        )
    if overlong == "drop":
        chats.select(np.flatnonzero(chats.lengths <= chats.limit))
        if not len(chats):
            raise RequestError(
                f"--max-length {chats.limit}: no {chats.noun} for {split} is as short", remedy="a larger one"
            )
    return f"{pluralize(beyond, f'overlong {chats.noun}')} of {split} {'dropped' if overlong == 'drop' else 'cut'}"


def _check_learned(chats: Chats, learns: str) -> None:
    """Refuse samples of which nothing is learned: they would only cost time, and are rarely meant."""
    without = np.flatnonzero(chats.learned == 0)
    if not len(without):
        return
    first = int(without[0])
    if chats.lengths[first] > chats.limit:
        raise RequestError(
            f"--max-length {chats.limit}: of {pluralize(len(without), chats.noun)} nothing is learned; the first "
            f"({chats.describe(first)}) is cut off before what the model is to say",
            remedy="a larger --max-length, or --set data.args.overlong=drop",
        )
    raise RequestError(
        f"--data chat: of {pluralize(len(without), chats.noun)} nothing is learned with data.loss_on={learns}; the "
        f"first is {chats.describe(first)}",
        remedy="records with an answer, or another data.loss_on",
    )


def _check_ends(chats: Chats, ends: tuple[int, ...], tokenizer: Any) -> None:
    """Refuse where the model would never learn to stop, or begins twice; the first sample stands for all."""
    sample = chats[0]
    ids, labels = sample["input_ids"], sample["labels"]
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        raise RequestError(
            f"--data chat: {chats.describe(0)} begins with {tokenizer.bos_token!r} twice",
            remedy="a text or a chat template without it",
        )
    if chats.lengths[0] <= chats.limit and not np.isin(labels.numpy(), ends).any():
        last = tokenizer.convert_ids_to_tokens(int(labels[labels != IGNORED][-1]))
        names = ", ".join(tokenizer.convert_ids_to_tokens(list(ends)))
        raise RequestError(
            f"--data chat: what is learned of {chats.describe(0)} ends with {last!r}, and generation with {names}: "
            "the model would never learn to stop",
            remedy="the eos_token that the chat template writes, in tokenizer_config.json or generation_config.json",
        )
