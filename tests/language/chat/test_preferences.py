from typing import Any

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.conversations import Conversation, detect_form, read_conversation

ASKED = {"role": "user", "content": "What is 2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
AGAIN = {"role": "user", "content": "Sure?"}


def read(**record: Any) -> Conversation:
    return read_conversation(record, "preference", "a.jsonl:1")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASKED], "chosen": [FOUR], "rejected": [FIVE]},
        {"prompt": [ASKED], "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]},
        {"prompt": "What is 2 + 2?", "chosen": [FOUR], "rejected": [FIVE]},
        {"prompt": "What is 2 + 2?", "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE], "messages": [ASKED, FOUR]},
        {"chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]},
    ],
)
def test_each_form_of_messages_is_read_as_the_same(record: dict[str, Any]) -> None:
    assert detect_form(record, "a.jsonl:1") == "preference"
    found = read(**record, tools=["t"])
    assert found.rejected is not None
    assert (found.messages, found.rejected.messages) == ([ASKED, FOUR], [ASKED, FIVE])
    assert found.num_prompt_messages == found.rejected.num_prompt_messages == 1
    assert found.tools == found.rejected.tools == ["t"]


def test_whole_conversations_have_a_prompt_of_several_messages() -> None:
    found = read(chosen=[ASKED, FOUR, AGAIN, FOUR], rejected=[ASKED, FOUR, AGAIN, FIVE, AGAIN, FIVE])
    assert found.num_prompt_messages == 3
    begun = [ASKED, FOUR | {"weight": 0}, AGAIN]
    assert read(chosen=[*begun, FOUR], rejected=[*begun, FIVE]).num_prompt_messages == 3, (
        "of the prompt nothing is learned anyway"
    )
    assert read(chosen=[ASKED, FOUR], rejected=[ASKED, FOUR]).num_prompt_messages == 1, "the same answers are answers"


def test_texts_have_a_prompt_or_a_common_beginning() -> None:
    for record in (
        {"prompt": "Q: 2 + 2? A:", "chosen": " 4", "rejected": " 5"},
        {"chosen": "Q: 2 + 2? A: 4", "rejected": "Q: 2 + 2? A: 5"},
    ):
        found = read(**record)
        assert found.messages is None
        assert found.rejected is not None
        assert (found.prompt + found.completion, found.rejected.completion[-1]) == ("Q: 2 + 2? A: 4", "5")
        assert found.prompt == found.rejected.prompt
        assert found.prompt.startswith("Q: 2 + 2? A:")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "a.jsonl:1 has no 'rejected', as records of the form preference have"),
        ({"prompt": "a", "chosen": "b", "rejected": [FIVE]}, "one of chosen and rejected is a list"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "prompt is a int"),
        ({"chosen": "x", "rejected": "y"}, "begin with nothing in common, and there is no prompt"),
        ({"chosen": None, "rejected": None}, "neither texts nor lists"),
        ({"chosen": [FOUR], "rejected": [FIVE]}, "begin with no message in common"),
        ({"chosen": [ASKED, FOUR], "rejected": [AGAIN, FIVE]}, "begin with no message in common"),
        ({"chosen": [ASKED, FOUR, ASKED, FOUR], "rejected": [ASKED, FOUR, AGAIN, FOUR]}, "message 3 of chosen and"),
        ({"prompt": "Hello?", "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]}, "does not have the prompt in it"),
        ({"prompt": [ASKED, FOUR, AGAIN], "chosen": [], "rejected": [FIVE]}, "no message after the prompt"),
        ({"prompt": [ASKED], "chosen": [{"role": "assistant"}], "rejected": [FIVE]}, "message 2 has no content"),
        ({"chosen": [7], "rejected": [FIVE]}, "message 1 has no role"),
        ({"prompt": [ASKED], "chosen": [FOUR], "rejected": [FIVE | {"weight": 0}]}, "answers are compared as a whole"),
    ],
)
def test_what_is_no_preference_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(**record)
