"""What is learned with the chat templates of well-known models: as the golden files have it, and as trl marks it."""

from importlib.util import find_spec
from itertools import groupby
from unittest.mock import patch

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.conversations import Conversation
from multigpu_cli.language.chat.encoder import ChatEncoder, ChatTokens, fix_date
from tests.support.golden_masks import (
    GOLDEN,
    describe_masks,
    list_templates,
    make_conversations,
    make_long_conversations,
    make_tokenizer,
    read_golden,
)

pytest.importorskip("transformers", reason="transformers is not installed")
if not (find_spec("trl") and find_spec("chatterbot_corpus")):
    pytest.skip("trl or chatterbot-corpus is not installed", allow_module_level=True)

GIVEN = (
    *("\n", "<think>", "<think>\n", "<think>\n\n</think>\n\n", "<|start|>assistant"),
    *("<｜Assistant｜>", "<｜Assistant｜><think>\n", "<｜tool▁outputs▁end｜>"),
)
"""What trl marks and the call for an answer writes already, or what comes after the answer's end."""


def test_masks_are_as_in_the_golden_files() -> None:
    """All templates in one test: the tokenizer is trained once."""
    different = [name for name in list_templates() if describe_masks(name) != read_golden(name)]
    assert not different, "python -m tests.support.golden_masks writes them anew"
    assert {path.stem for path in GOLDEN.glob("*.txt")} <= set(list_templates())


def test_masks_of_long_conversations_are_those_found_answer_by_answer() -> None:
    compared, quick = 0, 0
    for name in sorted(path.stem for path in GOLDEN.glob("*.txt")):
        tokenizer, ends = make_tokenizer(name)
        for title, conversation in make_long_conversations().items():
            encoder = ChatEncoder(tokenizer, None, "assistant", ends)
            with patch.object(encoder, "_find_answer", wraps=encoder._find_answer) as find:
                found = try_to_encode(encoder, conversation)
            with patch.object(encoder, "_find_by_neighbours", return_value={}):
                assert found == try_to_encode(encoder, conversation), (name, title)
            compared += isinstance(found, ChatTokens)
            quick += isinstance(found, ChatTokens) and find.call_count == 2
    assert compared > 60
    assert quick > 60


def try_to_encode(encoder: ChatEncoder, conversation: Conversation) -> ChatTokens | str:
    try:
        return encoder.encode(conversation, "a:1")
    except RequestError as error:
        return str(error)


def test_masks_agree_with_the_marks_in_trls_templates() -> None:
    """Its variants for training mark what the assistant says; they were made without our rendering of prefixes."""
    compared = 0
    for name in (name for name in list_templates() if name.endswith("_training")):
        tokenizer, ends = make_tokenizer(name)
        for title, conversation in make_conversations().items():
            if (name, title) == ("diffusion_gemma_training", "a call of a tool"):
                continue  # that one does not write the role after a tool's answer where it asks, so the model does
            try:
                ids, learned = ChatEncoder(tokenizer, None, "assistant", ends).encode(conversation, "a:1")
            except RequestError:
                continue
            marked = tokenizer.apply_chat_template(
                conversation.messages,
                tools=conversation.tools,
                return_dict=True,
                return_assistant_tokens_mask=True,
                chat_template=fix_date(tokenizer.chat_template),
            )["assistant_masks"]
            if name == "gptoss_training":  # the end of a message that is not the last, where the model says <|return|>
                end = tokenizer.convert_tokens_to_ids("<|end|>")
                all = zip(ids, learned, marked, strict=True)
                marked = [mark and (counts or token != end) for token, counts, mark in all]
            for (counts, theirs), group in groupby(zip(ids, learned, marked, strict=True), key=lambda each: each[1:]):
                text = tokenizer.decode([token for token, *_ in group])
                assert bool(counts) == bool(theirs) or (theirs and text in GIVEN), (name, title, text)
            compared += any(learned)
    assert compared > 120
