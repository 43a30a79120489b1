"""The forms in which people keep conversations, as one."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from multigpu_cli.errors import RequestError

Record = Mapping[str, Any]
Messages = list[dict[str, Any]]

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}
_LISTED = 8  # names of a record in a message
_WEIGHTS = ("weight", "train")  # whether a message is learned, as OpenAI and axolotl name it
_MARKS = (*_WEIGHTS, "train_detail")
_UNWANTED = ("label", "kto_tag")  # of an answer with true or false, as TRL and LLaMA-Factory name it


class Conversation(NamedTuple):
    """One record."""

    messages: list[dict[str, Any]] | None = None  # {"role": …, "content": …} each, for the chat template; or None
    prompt: str = ""  # of plain text
    completion: str = ""  # of plain text
    tools: list[Any] | None = None  # what the template is told of tools, or None
    num_prompt_messages: int = 0  # so many messages are the prompt: nothing of them is learned
    rejected: "Conversation | None" = None  # of a preference, that with the other answer; this one has the chosen one


class RecordFormat(NamedTuple):
    """A form of records: those that have all its fields."""

    fields: tuple[str, ...]
    read: Callable[[Record], Conversation]  # a record → a conversation; raises ValueError
    loss_on: str  # what is learned unless the user says otherwise: assistant, completion or all


def _read_messages(record: Record) -> Conversation:
    return Conversation(_check_messages(record["messages"]), tools=_read_tools(record))


def _read_tools(record: Record) -> Any:
    """What the template is told of tools: a list, or a JSON text of one, as tables have it."""
    tools = record.get("tools")
    try:
        return json.loads(tools) if isinstance(tools, str) and tools else tools or None
    except ValueError as error:
        raise ValueError(f"tools is no JSON ({error})") from error


def _read_completion(record: Record) -> Conversation:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return Conversation(_check_messages([*prompt, *completion]), tools=_read_tools(record))
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
        raise ValueError("conversations is not a list of objects")
    messages: list[dict[str, Any]] = []
    for turn in turns:
        role = turn.get("from", turn.get("role"))
        role = _ROLES.get(str(role), role)
        if messages or role != "assistant":  # some begin in mid-talk: such a turn answers nothing (Vicuna drops it too)
            marks = {name: turn[name] for name in _MARKS if name in turn}
            messages.append({"role": role, "content": turn.get("value", turn.get("content")), **marks})
    return Conversation(_check_messages([*_read_system(record), *messages]), tools=_read_tools(record))


def _read_system(record: Record) -> list[dict[str, Any]]:
    """The message of the system that stands beside the others in a record, if any."""
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def _read_preference(record: Record) -> Conversation:
    """The conversation with the chosen answer; its `rejected` has the other one.

    Answers are texts, or messages. Where there is no prompt, or they begin with it, it is what both begin with.
    """
    chosen, rejected, prompt = record["chosen"], record["rejected"], record.get("prompt")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError("one of chosen and rejected is a list of messages, the other is not")
    if isinstance(chosen, list) or isinstance(prompt, list):
        return _read_answers(_to_messages(chosen), _to_messages(rejected), prompt, _read_tools(record))
    if prompt is None:
        prompt = _find_common_text(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    answers = ({"prompt": prompt, "completion": answer} for answer in (chosen, rejected))
    one, other = map(_read_completion, answers)
    return one._replace(rejected=other)


def _to_messages(answer: Any) -> Any:
    """An answer as messages; a text is what the assistant says."""
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _find_common_text(chosen: Any, rejected: Any) -> str:
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise ValueError("chosen and rejected are neither texts nor lists of messages")
    if not (size := count_same(chosen, rejected)):
        raise ValueError("chosen and rejected begin with nothing in common, and there is no prompt")
    return chosen[:size]


def count_same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters, tokens or messages two sequences begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _read_answers(chosen: Any, rejected: Any, prompt: Any, tools: Any) -> Conversation:
    begun = _to_prompt(prompt, chosen)
    whole = [  # an answer may be the whole conversation already
        answer if not isinstance(answer, list) or answer[: len(begun)] == begun else [*begun, *answer]
        for answer in (chosen, rejected)
    ]
    one, other = map(_check_messages, whole)
    if min(len(one), len(other)) <= len(begun):
        raise ValueError("chosen or rejected has no message after the prompt")
    shared = _count_given(one, other)
    if isinstance(prompt, str) and prompt not in [message["content"] for message in one[:shared]]:
        raise ValueError("what chosen and rejected begin with in common does not have the prompt in it")
    if not all(map(is_learned, (*one[shared:], *other[shared:]))):
        raise ValueError("a message of chosen or rejected has weight 0 or train false: answers are compared as a whole")
    refused = Conversation(other, tools=tools, num_prompt_messages=shared)
    return refused._replace(messages=one, rejected=refused)


def _to_prompt(prompt: Any, chosen: Any) -> Messages:
    """The messages that stand before an answer; none where the answers are whole conversations."""
    if isinstance(prompt, list):
        return prompt
    first = chosen[0] if isinstance(chosen, list) and chosen else {}
    if prompt is None or (isinstance(first, Mapping) and first.get("role") != "assistant"):
        return []
    return [{"role": "user", "content": prompt}]


def _count_given(chosen: Messages, rejected: Messages) -> int:
    """How many messages are the prompt: those that both begin with, before an answer of the assistant to each."""
    shared = count_same(chosen[:-1], rejected[:-1])  # equal last ones are answers too
    if not shared:
        raise ValueError("chosen and rejected begin with no message in common, and there is no prompt")
    if {chosen[shared]["role"], rejected[shared]["role"]} != {"assistant"}:
        raise ValueError(f"message {shared + 1} of chosen and rejected differs, and is not the assistant's in both")
    return shared


PREFERENCE = "preference"
FORMS = {  # by their names in data.args.format, in the order in which they are tried
    PREFERENCE: RecordFormat(("chosen", "rejected"), _read_preference, "assistant"),
    "messages": RecordFormat(("messages",), _read_messages, "assistant"),
    "sharegpt": RecordFormat(("conversations",), _read_sharegpt, "assistant"),
    "alpaca": RecordFormat(("instruction", "output"), _read_alpaca, "assistant"),
    "completion": RecordFormat(("prompt", "completion"), _read_completion, "completion"),
    "text": RecordFormat(("text",), _read_text, "all"),
}


def detect_form(record: Record, place: str) -> str:
    """The name of the form that a record has the fields of; RequestError for none, or for a text and its class."""
    for name, form in FORMS.items():
        if all(field in record for field in form.fields):
            if name == "text" and record.get("label") is not None:
                raise RequestError(
                    f"--data chat: {place} has text and label: the text would be learned, and its label would not",
                    remedy="data.args.format=text to learn the texts alone; classes of texts are learned from a "
                    "dataset of your own: --data module:function --task classification",
                )
            return name
    forms = ", or ".join(f"{' and '.join(form.fields)} ({name})" for name, form in FORMS.items())
    problem = f"--data chat: {place} has {', '.join(list(record)[:_LISTED]) or 'no field'}"
    raise RequestError(problem, remedy=f"records with {forms}; plain ones are for --data csv")


def read_conversation(record: Record, form: str, place: str) -> Conversation:
    """A record as a conversation; RequestError where it is not of that form, or has an unwanted answer."""
    unwanted = next((name for name in _UNWANTED if record.get(name) is False), None)
    if unwanted and form not in (PREFERENCE, "text"):
        raise RequestError(
            f"--data chat: {place} has {unwanted}: false: its answer is an unwanted one (KTO), and would be learned",
            remedy="leave out such records; or pairs of a chosen and a rejected answer, for --task dpo",
        )
    try:
        return FORMS[form].read(record)
    except KeyError as missing:
        problem = f"--data chat: {place} has no {missing}, as records of the form {form} have"
        raise RequestError(problem, remedy="records of one form, or data.args.format") from missing
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
        raise ValueError(f"message {number}: tool_calls is not a list")
    if "tool_calls" in found:
        found["tool_calls"] = [_read_call(call, number) for call in found["tool_calls"]]
    _check_marks(found, number)
    return found


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether neither weight nor train of a message says that it is not."""
    return all(message.get(name, True) for name in _WEIGHTS)


def _check_marks(message: Mapping[str, Any], number: int) -> None:
    """Refuse marks that say anything else than that a message is not learned, or one of the assistant is."""
    for name in (name for name in _MARKS if name in message):
        said = f"message {number} has {name}: {json.dumps(message[name])}"
        if message[name] not in (0, 1):
            raise ValueError(f"{said}; a message is learned as a whole (weight: 1, train: true) or not (0, false)")
        if message[name] and message["role"] != "assistant":
            raise ValueError(f"{said}, and is not the assistant's: of those alone some are learned")


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
