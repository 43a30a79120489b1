import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.conversations import Conversation, read_conversation
from multigpu_cli.language.chat.encoder import ChatEncoder
from tests.support.tiny_language_models import CHATML, make_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

THINKING = (  # as reasoning models' templates do, it leaves out earlier thoughts
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The capital of France?"},
    {"role": "assistant", "content": "<think>hm</think>Paris"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4, of course."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def decode_learned(tokenizer: Any, conversation: Conversation, loss_on: str, template: str | None = None) -> list[str]:
    """The stretches of text that are learned."""
    ends = [tokenizer.eos_token_id]
    ids, learned = ChatEncoder(tokenizer, template, loss_on, ends).encode(conversation, "a:1")
    stretches: list[list[int]] = [[]]
    for token, counts in zip(ids, learned, strict=True):
        if counts:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(stretch) for stretch in stretches if stretch]


def test_each_answer_with_its_end_and_nothing_after_it(tokenizer: Any) -> None:
    talk = Conversation(TALK)
    assert decode_learned(tokenizer, talk, "assistant") == [
        "<think>hm</think>Paris<|im_end|>",
        "4, of course.<|im_end|>",
    ]
    assert decode_learned(tokenizer, talk, "completion") == ["4, of course.<|im_end|>"]
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert decode_learned(tokenizer, talk, "all") == [whole]
    assert ChatEncoder(tokenizer, None, "all", []).encode(talk, "a:1").ids == tokenizer(whole).input_ids


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_a_message_with_weight_0_is_not_learned(tokenizer: Any, mark: dict[str, Any]) -> None:
    turns = [*TALK[:2], TALK[2] | mark, TALK[3] | {"train": False}, TALK[4] | {"weight": 1.0, "train": True}]
    talk = read_conversation({"messages": turns}, "messages", "a:1")
    assert decode_learned(tokenizer, talk, "assistant") == ["4, of course.<|im_end|>"]
    assert decode_learned(tokenizer, talk, "assistant", THINKING) == ["4, of course.<|im_end|>"]
    plain = Conversation(TALK)
    encoder = ChatEncoder(tokenizer, None, "assistant", [])
    assert encoder.encode(talk, "a:1").ids == encoder.encode(plain, "a:1").ids
    with pytest.raises(RequestError, match=r"a:1 has a message with weight 0 or train false: data\.args\.loss_on=all"):
        decode_learned(tokenizer, talk, "all")


def test_nothing_is_learned_where_the_last_message_is_not_an_answer(tokenizer: Any) -> None:
    assert decode_learned(tokenizer, Conversation(TALK[:4]), "completion") == []


def test_answers_that_a_template_renders_otherwise_later_are_learned_as_they_are_rendered(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer, THINKING, "assistant", [tokenizer.eos_token_id])
    encoder.encode(Conversation(TALK), "a:1")
    assert list(encoder.notes.values()) == [
        "a:1: the chat template renders message 3 otherwise when more follow; what it renders is learned",
        "a:1: the chat template leaves the thought of message 3 out: it is not learned",
    ]
    found = decode_learned(tokenizer, Conversation(TALK), "assistant", THINKING)
    assert found == ["Paris<|im_end|>", "4, of course.<|im_end|>"]
    assert decode_learned(tokenizer, Conversation(TALK), "completion", THINKING) == ["4, of course.<|im_end|>"]


def test_a_thought_that_is_asked_for_and_not_rendered_is_not_learned(tokenizer: Any) -> None:
    """As DeepSeek's template does; an answer that begins as the thought is learned from its first character."""
    asking = THINKING.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    talk = [*TALK[:4], {"role": "assistant", "content": "<b>4</b>"}]
    for loss_on, found in (
        ("assistant", ["Paris<|im_end|>", "<b>4</b><|im_end|>"]),
        ("completion", ["<b>4</b><|im_end|>"]),
    ):
        assert decode_learned(tokenizer, Conversation(talk), loss_on, asking) == found
    first = Conversation(TALK[:3])
    assert decode_learned(tokenizer, first, "assistant", asking) == ["hm</think>Paris<|im_end|>"]


def test_a_second_thought_of_the_templates_own_is_noted(tokenizer: Any) -> None:
    doubling = CHATML.replace("{{ message['content'] }}", "<think></think>{{ message['content'] }}")
    encoder = ChatEncoder(tokenizer, doubling, "assistant", [tokenizer.eos_token_id])
    encoder.encode(Conversation(TALK), "a:1")
    assert "a thought of its own before that of message 3: give it as reasoning_content" in encoder.notes["thought"]


def test_a_template_whose_answers_can_not_be_found_is_refused(tokenizer: Any) -> None:
    strange = THINKING.replace("[-1]", "[-1] * 2")
    with pytest.raises(RequestError, match="a:1: the chat template renders message 3 otherwise when") as raised:
        decode_learned(tokenizer, Conversation(TALK), "assistant", strange)
    assert "data.loss_on=completion" in str(raised.value.remedy)


def test_a_template_that_writes_the_date_gets_always_the_same(tokenizer: Any) -> None:
    """As Llama 3.2's and gpt-oss's do; the second one calls it within a macro."""
    plain = "{{ strftime_now('%d %b %Y, %A %-d.%-m.') }} " + CHATML
    within = (
        "{%- macro day() -%}{{ strftime_now('%Y-%m-%d') }}{%- endmacro -%}\n  {%- if true %}{{ day() }} {% endif %}"
        + CHATML
    )
    for template, date in ((plain, "26 Jul 2024, Friday 26.7."), (within, "2024-07-26")):
        (whole,) = decode_learned(tokenizer, Conversation(TALK), "all", template)
        assert whole == f"{date} {tokenizer.apply_chat_template(TALK, tokenize=False)}"


def test_eos_at_the_end_of_the_whole_alone(tokenizer: Any) -> None:
    """As Phi 3's template has it."""
    closing = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    found = decode_learned(tokenizer, Conversation(TALK), "assistant", closing)
    assert found == ["<think>hm</think>Paris<|im_end|>", "4, of course.<|im_end|>\n<|im_end|>"]


def test_a_long_conversation_with_a_template_that_counts_messages(tokenizer: Any) -> None:
    """Its parts are not rendered alike where fewer messages stand before them."""
    counting = CHATML.replace("{{ message['content'] }}", "{{ loop.index }} {{ message['content'] }}")
    turns = [{"role": ("assistant", "user")[at % 2], "content": f"Number {at}"} for at in range(1, 19)]
    found = decode_learned(tokenizer, Conversation(turns), "assistant", counting)
    assert found == [f"{at} Number {at}<|im_end|>" for at in range(2, 19, 2)]


@pytest.mark.parametrize(
    ("rendered", "said"),
    [("", "leaves 'Paris' of message 3 out"), ("{{ message.content }}", "leaves 'weather' of message 5 out")],
)
def test_a_template_that_leaves_out_what_is_to_be_learned_is_refused(rendered: str, said: str, tokenizer: Any) -> None:
    """Only its end would be learned: to answer nothing."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    template = CHATML.replace("{{ message['content'] }}", rendered)
    with pytest.raises(RequestError, match=said):
        decode_learned(tokenizer, Conversation([*TALK[:4], call]), "assistant", template)


def test_messages_need_a_template() -> None:
    bare = make_tokenizer(template=None)
    with pytest.raises(
        RequestError, match=r"a:1 has messages, and the model has no chat template.*\n.*chat_template=FILE"
    ):
        decode_learned(bare, Conversation(TALK), "assistant")
    assert decode_learned(bare, Conversation(TALK[:3]), "assistant", CHATML)


def test_a_template_of_the_users_own_in_place_of_the_models(tokenizer: Any) -> None:
    spoken = CHATML.replace("<|im_end|>\n", "<|im_end|>")
    ids = ChatEncoder(tokenizer, spoken, "all", []).encode(Conversation(TALK), "a:1").ids
    assert "<|im_end|><|im_start|>" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("conversation", "loss_on", "expected"),
    [
        (Conversation(prompt="2 + 2 =", completion=" 4"), "completion", [" 4<|im_end|>"]),
        (Conversation(prompt="2 + 2 =", completion=" 4"), "all", ["2 + 2 = 4<|im_end|>"]),
        (Conversation(completion="The fox."), "all", ["The fox.<|im_end|>"]),
        (Conversation(completion="The fox.<|im_end|>"), "all", ["The fox.<|im_end|>"]),
    ],
)
def test_plain_text_ends_with_eos(
    conversation: Conversation, loss_on: str, expected: list[str], tokenizer: Any
) -> None:
    assert decode_learned(tokenizer, conversation, loss_on) == expected


@pytest.mark.parametrize(
    ("messages", "template", "said"),
    [
        (TALK[2:], None, "begins with a message of the assistant"),
        (TALK, "{{ raise_exception('no system here') }}", "does not take its first 5 messages .no system here"),
        (TALK, "{{ messages[0].__class__.__mro__ }}", "does not take its first 5 messages"),
    ],
)
def test_what_a_template_does_not_take_is_named(
    messages: list[dict[str, str]], template: str | None, said: str, tokenizer: Any
) -> None:
    """The last one shows that the template runs in a sandbox."""
    with pytest.raises(RequestError, match=f"a:1:? .*{said}|a:1 {said}"):
        decode_learned(tokenizer, Conversation(messages), "assistant", template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 seconds"),
        ("{{ 'a' * 1000000000 }}", "(MemoryError|1,000,000,000 characters)"),
        ("{{ 'a' * 10000000000000 }}", "MemoryError"),
        ("{{ 'a' * 9000000 }}", "its text has 9,000,000 characters"),
        ("{{ '%999999999999d' % 1 }}", "does not take"),
        ("{{ 9 ** (9 ** 9) }}", "more than 1 seconds"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "does not take"),
    ],
)
def test_template_is_refused_within_seconds(
    tokenizer: Any, template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time, memory and length are bounded, which the sandbox of transformers does not do."""
    monkeypatch.setattr("multigpu_cli.language.chat.encoder._SECONDS", 1)
    encoder = ChatEncoder(tokenizer, template, "all", [])
    with pytest.raises(RequestError, match=message) as refused:
        encoder.encode(Conversation(TALK), "a:1")
    assert "template" in refused.value.remedy
    assert ChatEncoder(tokenizer, None, "all", []).encode(Conversation(TALK), "a:1").ids


def test_process_of_the_template_holds_no_lock_of_its_parent(tokenizer: Any, tmp_path: Path) -> None:
    """It is forked while the file of tokens is locked, and lives longer than that lock."""
    encoder = ChatEncoder(tokenizer, None, "all", [])
    with (tmp_path / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        encoder.encode(Conversation(TALK), "a:1")
    with (tmp_path / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert encoder.encode(Conversation(TALK), "a:2").ids


def test_fork_that_drops_the_encoder_leaves_the_templates_process_alone(tokenizer: Any) -> None:
    """A loader process ends with a copy of all that its parent had."""
    encoder = ChatEncoder(tokenizer, None, "all", [])
    encoder.encode(Conversation(TALK), "a:1")
    child = os.fork()
    if child == 0:
        del encoder
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert encoder.encode(Conversation(TALK), "a:2").ids
