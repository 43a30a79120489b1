import json
from typing import Any

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.conversations import FORMS, Conversation, detect_form, read_conversation

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"name": "add"}]


@pytest.mark.parametrize(
    ("form", "record", "expected"),
    [
        ("messages", {"messages": [USER, ANSWER], "tools": TOOLS}, Conversation([USER, ANSWER], tools=TOOLS)),
        (
            "messages",
            {"messages": [USER, ANSWER], "tools": json.dumps(TOOLS)},
            Conversation([USER, ANSWER], tools=TOOLS),
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
            Conversation([USER, ANSWER]),
        ),
        ("sharegpt", {"conversations": [USER, ANSWER], "system": "Be brief."}, Conversation([SYSTEM, USER, ANSWER])),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "Hi"}, USER, ANSWER]}, Conversation([USER, ANSWER])),
        ("alpaca", {"instruction": "2 + 2?", "input": "", "output": "4"}, Conversation([USER, ANSWER])),
        (
            "alpaca",
            {"instruction": "Add", "input": "2 2", "output": "4"},
            Conversation([{"role": "user", "content": "Add\n\n2 2"}, ANSWER]),
        ),
        ("completion", {"prompt": "2 + 2 =", "completion": " 4"}, Conversation(prompt="2 + 2 =", completion=" 4")),
        ("completion", {"prompt": [USER], "completion": [ANSWER]}, Conversation([USER, ANSWER])),
        ("text", {"text": "Four."}, Conversation(completion="Four.")),
    ],
)
def test_each_form_is_recognized_and_read(form: str, record: dict[str, Any], expected: Conversation) -> None:
    assert detect_form(record, "a:1") == form
    assert read_conversation(record, form, "a:1") == expected


def test_marks_that_change_nothing_are_none() -> None:
    """Nulls and false of others than the assistant, as axolotl's and tables have them; labels that are no verdict."""
    turns = [{"from": "human", "value": "2 + 2?", "train": False}, {"from": "gpt", "value": "4", "weight": None}]
    messages = read_conversation({"conversations": turns, "label": 3}, "sharegpt", "a:1").messages
    assert messages == [USER | {"train": False}, ANSWER]
    kept = {"prompt": "2 + 2 =", "completion": " 4", "label": True}
    assert read_conversation(kept, detect_form(kept, "a:1"), "a:1").completion == " 4"


def test_a_text_with_its_class_is_refused_unless_the_form_is_named() -> None:
    record = {"text": "Four.", "label": 0}
    with pytest.raises(RequestError, match="a:1 has text and label: the text would be learned") as raised:
        detect_form(record, "a:1")
    assert "data.args.format=text" in str(raised.value.remedy)
    assert read_conversation(record, "text", "a:1").completion == "Four."
    assert detect_form({"text": "Four.", "label": None, "id": 7}, "a:1") == "text"


def test_what_has_no_form_is_told_all_of_them() -> None:
    with pytest.raises(RequestError, match="a:7 has question, answer") as raised:
        detect_form({"question": "", "answer": ""}, "a:7")
    assert all(name in str(raised.value) for name in FORMS)


@pytest.mark.parametrize(
    ("form", "record", "said"),
    [
        ("messages", {"text": ""}, "a:2 has no 'messages'"),
        ("messages", {"messages": []}, "there are no messages"),
        ("messages", {"messages": [{"content": "x"}]}, "message 1 has no role"),
        ("messages", {"messages": [USER, {"role": "assistant"}]}, "message 2 has no content"),
        ("sharegpt", {"conversations": "hello"}, "not a list of objects"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "Hi"}]}, "there are no messages"),
        ("alpaca", {"instruction": 3, "output": ""}, "instruction is a int"),
        ("completion", {"prompt": "a", "completion": [ANSWER]}, "completion is a list"),
        ("text", {"text": None}, "text is a NoneType"),
        ("completion", {"prompt": "a", "completion": "b", "label": False}, "label: false: its answer is an unwanted"),
        ("sharegpt", {"conversations": [USER, ANSWER], "kto_tag": False}, "kto_tag: false: its answer is an unwanted"),
    ],
)
def test_a_record_that_is_not_of_the_form_is_named(form: str, record: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=f"a:2.*{said}|{said}") as raised:
        read_conversation(record, form, "a:2")
    assert "a:2" in str(raised.value)


def test_messages_come_to_the_template_as_texts_and_objects() -> None:
    """Parts of text joined, arguments of calls read, and without the nulls that tables write for missing fields."""
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2?"}],
        "name": None,
    }
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
    }
    found = read_conversation({"messages": [parts, call], "tools": None}, "messages", "a:1").messages
    function = {"name": "add", "arguments": {"a": 2}}
    assert found == [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": [{"type": "image", "url": "a.png"}]}, "message 1 has a part of type image; text alone is read"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": "{a"}}]}, "the arguments of add are not JSON"),
        ({"tool_calls": [{"id": "1"}]}, "message 1 has a call of a tool without a name"),
        ({"tool_calls": 1}, "message 1: tool_calls is not a list"),
        ({"content": "4", "weight": 0.5}, "message 1 has weight: 0.5; a message is learned as a whole"),
        ({"content": "4", "train": "no"}, 'message 1 has train: "no"; a message is learned as a whole'),
        ({"content": "4", "train_detail": [{"train": False}]}, "message 1 has train_detail"),
        ({"role": "user", "content": "4", "weight": 1}, "message 1 has weight: 1, and is not the assistant's"),
        ({"role": "user", "content": "4", "train": True}, "message 1 has train: true, and is not the assistant's"),
    ],
)
def test_what_is_no_text_is_named(message: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_conversation({"messages": [{"role": "assistant", **message}]}, "messages", "a:1")
