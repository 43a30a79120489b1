"""Reads preferences: a prompt, and two answers to it, of which one was chosen."""

from collections.abc import Mapping
from typing import Any

from multigpu_cli.data.conversations import FORMS, Conversation, Record

Messages = list[dict[str, Any]]


def read_preference(record: Record) -> Conversation:
    """The conversation with the chosen answer; its `rejected` has the other one.

    Answers are texts, or messages. Where there is no prompt, or they begin with it, it is what both begin with.

    Raises:
        KeyError: an answer is missing.
        ValueError: something is no text or message, or the answers are not to one prompt.
    """
    chosen, rejected, prompt = record["chosen"], record["rejected"], record.get("prompt")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError("one of chosen and rejected is a list of messages, the other is not")
    if isinstance(chosen, list) or isinstance(prompt, list):
        return _read_messages(_to_messages(chosen), _to_messages(rejected), prompt, record.get("tools"))
    if prompt is None:
        prompt = _find_common_text(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    answers = ({"prompt": prompt, "completion": answer} for answer in (chosen, rejected))
    one, other = map(FORMS["completion"].read, answers)
    return one._replace(rejected=other)


def _to_messages(answer: Any) -> Any:
    """An answer as messages; a text is what the assistant says."""
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _find_common_text(chosen: Any, rejected: Any) -> str:
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise ValueError("chosen and rejected are neither texts nor lists of messages")
    alike = zip(chosen, rejected, strict=False)
    size = next((at for at, (one, other) in enumerate(alike) if one != other), min(len(chosen), len(rejected)))
    if not size:
        raise ValueError("chosen and rejected begin with nothing in common, and there is no prompt")
    return chosen[:size]


def _read_messages(chosen: Any, rejected: Any, prompt: Any, tools: Any) -> Conversation:
    begun = _to_prompt(prompt, chosen)
    one, other = (_check(_put_behind(begun, answer)) for answer in (chosen, rejected))
    if min(len(one), len(other)) <= len(begun):
        raise ValueError("chosen or rejected has no message after the prompt")
    given = _count_given(one, other)
    if isinstance(prompt, str) and prompt not in [message["content"] for message in one[:given]]:
        raise ValueError("what chosen and rejected begin with in common does not have the prompt in it")
    return Conversation(one, tools=tools, given=given, rejected=Conversation(other, tools=tools, given=given))


def _to_prompt(prompt: Any, chosen: Any) -> Messages:
    """The messages that stand before an answer; none where the answers are whole conversations."""
    if isinstance(prompt, list):
        return prompt
    if prompt is None or _begins_with_another(chosen):
        return []
    return [{"role": "user", "content": prompt}]


def _begins_with_another(answer: Any) -> bool:
    """Whether messages begin with another's than the assistant's."""
    first = answer[0] if isinstance(answer, list) and answer else {}
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def _put_behind(begun: Messages, answer: Any) -> Any:
    """The whole conversation: the answer may be it already."""
    whole = not isinstance(answer, list) or answer[: len(begun)] == begun
    return answer if whole else [*begun, *answer]


def _check(messages: Any) -> Messages:
    return FORMS["messages"].read({"messages": messages}).messages or []


def _count_given(chosen: Messages, rejected: Messages) -> int:
    """How many messages are the prompt: those that both begin with, before an answer of the assistant to each.

    Raises:
        ValueError: there are none.
    """
    shorter = min(len(chosen), len(rejected))
    pairs = zip(chosen[: shorter - 1], rejected, strict=False)  # equal ones are answers too
    given = next((number for number, (one, other) in enumerate(pairs) if one != other), shorter - 1)
    if not given:
        raise ValueError("chosen and rejected begin with no message in common, and there is no prompt")
    if {chosen[given]["role"], rejected[given]["role"]} != {"assistant"}:
        raise ValueError(f"message {given + 1} of chosen and rejected differs, and is not the assistant's in both")
    return given
