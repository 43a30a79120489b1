"""The forms in which people keep conversations, as one."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from multigpu_cli.errors import RequestError

Record = Mapping[str, Any]

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}
_LISTED = 8  # names of a record in a message


class Conversation(NamedTuple):
    """One record.

    Attributes:
        messages: {"role": …, "content": …} each, for the model's chat template; None where the record is plain text.
        prompt, completion: of plain text.
        tools: what the template is told of tools, or None.
        given: so many messages are the prompt: nothing of them is learned.
        rejected: of a preference, the conversation with the other answer; this one has the chosen one.
    """

    messages: list[dict[str, Any]] | None = None
    prompt: str = ""
    completion: str = ""
    tools: list[Any] | None = None
    given: int = 0
    rejected: "Conversation | None" = None


class Form(NamedTuple):
    """A form of records.

    Attributes:
        fields: a record has all of them.
        read: a record → a conversation; raises ValueError.
        loss_on: what is learned unless the user says otherwise: assistant, completion or all.
    """

    fields: tuple[str, ...]
    read: Callable[[Record], Conversation]
    loss_on: str


def _read_messages(record: Record) -> Conversation:
    return Conversation(_check_messages(record["messages"]), tools=record.get("tools"))


def _read_completion(record: Record) -> Conversation:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return Conversation(_check_messages([*prompt, *completion]), tools=record.get("tools"))
    return Conversation(prompt=_check_text(prompt, "prompt"), completion=_check_text(completion, "completion"))


def _read_text(record: Record) -> Conversation:
    return Conversation(completion=_check_text(record["text"], "text"))


def _read_alpaca(record: Record) -> Conversation:
    asked = _check_text(record["instruction"], "instruction")
    if more := record.get("input"):
        asked += "\n\n" + _check_text(more, "input")
    answer = {"role": "assistant", "content": _check_text(record["output"], "output")}
    return Conversation(_check_messages([*_read_system(record), {"role": "user", "content": asked}, answer]))


def _read_sharegpt(record: Record) -> Conversation:
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError("conversations is no list of objects")
    messages: list[dict[str, Any]] = []
    for turn in turns:
        role = turn.get("from", turn.get("role"))
        role = _ROLES.get(str(role), role)
        if messages or role != "assistant":  # some begin in mid-talk: such a turn answers nothing (Vicuna drops it too)
            messages.append({"role": role, "content": turn.get("value", turn.get("content"))})
    return Conversation(_check_messages([*_read_system(record), *messages]), tools=record.get("tools"))


def _read_preference(record: Record) -> Conversation:
    from multigpu_cli.data.preferences import read_preference  # late: it builds on this module

    return read_preference(record)


def _read_system(record: Record) -> list[dict[str, Any]]:
    """The message of the system that stands beside the others in a record, if any."""
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


PREFERENCE = "preference"
FORMS = {
    PREFERENCE: Form(("chosen", "rejected"), _read_preference, "assistant"),
    "messages": Form(("messages",), _read_messages, "assistant"),
    "sharegpt": Form(("conversations",), _read_sharegpt, "assistant"),
    "alpaca": Form(("instruction", "output"), _read_alpaca, "assistant"),
    "completion": Form(("prompt", "completion"), _read_completion, "completion"),
    "text": Form(("text",), _read_text, "all"),
}
"""By their names in data.args.format, in the order in which they are tried."""


def detect_form(record: Record, place: str) -> str:
    """The name of the form that a record has the fields of.

    Raises:
        RequestError: none.
    """
    for name, form in FORMS.items():
        if all(field in record for field in form.fields):
            return name
    forms = ", or ".join(f"{' and '.join(form.fields)} ({name})" for name, form in FORMS.items())
    raise RequestError(
        f"--data chat: {place} has {', '.join(list(record)[:_LISTED]) or 'no field'}",
        remedy=f"records with {forms}; plain ones are for --data csv",
    )


def read_conversation(record: Record, form: str, place: str) -> Conversation:
    """A record as a conversation.

    Raises:
        RequestError: it is not of that form; names its place.
    """
    try:
        return FORMS[form].read(record)
    except KeyError as missing:
        raise RequestError(
            f"--data chat: {place} has no {missing}, as records of the form {form} have",
            remedy="records of one form, or data.args.format",
        ) from missing
    except ValueError as error:
        raise RequestError(f"--data chat: {place}: {error}", remedy="correct that line, or leave it out") from error


def _check_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is a {type(value).__name__}, not a text")
    return value


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as a template takes them: content is a text, empty where there are calls of tools alone."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("there are no messages in it")
    return [_check_message(message, number) for number, message in enumerate(messages, 1)]


def _check_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role")
    found = {name: value for name, value in message.items() if value is not None}  # of tables, which have each column
    content = found.get("content", "" if found.get("tool_calls") else None)
    if isinstance(content, list):
        content = _join_parts(content, number)
    if not isinstance(content, str):
        raise ValueError(f"message {number} has no content")
    found["content"] = content
    if not isinstance(found.get("tool_calls", []), list):
        raise ValueError(f"message {number}: tool_calls is no list")
    if "tool_calls" in found:
        found["tool_calls"] = [_read_call(call, number) for call in found["tool_calls"]]
    return found


def _join_parts(parts: list[Any], number: int) -> str:
    """The text of parts: templates of text models render a list as Python does, or as nothing."""
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"message {number} has a part of type {kind}; text alone is read")
    return "".join(part["text"] for part in parts)


def _read_call(call: Any, number: int) -> dict[str, Any]:
    """A call of a tool with its arguments as an object: as a JSON text they would be quoted twice."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"message {number} has a call of a tool without a name")
    if not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        read = {**function, "arguments": json.loads(function["arguments"] or "{}")}
    except ValueError as error:
        raise ValueError(f"message {number}: the arguments of {function['name']} are not JSON ({error})") from error
    return {**call, "function": read} if "function" in call else read
