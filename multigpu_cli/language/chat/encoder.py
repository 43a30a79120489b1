"""Conversations as tokens, with those that are learned, by the model's own tokenizer and chat template."""

import inspect
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import accumulate
from typing import Any, NamedTuple

from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.conversations import Conversation, count_same, is_learned

_FEW = 6  # answers, for which it is quicker to render all that is before each
_SHOWN = 60  # characters of a rendered text in a message
_OWN_VALUES = ("messages", "tools", "strftime_now", "bos_token", "eos_token")
TODAY = date(2024, 7, 26)  # for templates that write the date: Llama 3.1's own. Samples may not change from day to day
_SIGNS = ("a", "A", "b", "B", "d", "-d", "e", "m", "-m", "y", "Y", "j", "F", "D", "H", "I", "M", "S", "p", "T", "R")
_THOUGHT = re.compile("<think>(.*)</think>", re.DOTALL)
_MARK = "\ue000"  # a private character of Unicode, put into a message to find where it is rendered


class ChatTokens(NamedTuple):
    """The tokens of a sample, (t,) each: below the size of the vocabulary, and whether the model learns to say it."""

    ids: list[int]
    learned: list[bool]


class ChatEncoder:
    """Renders a conversation and marks what is learned.

    Which characters are the assistant's is found by rendering the messages before one of its own, with the template's
    call for an answer, and those up to it: marks inside a template are missing from most. Tokens are those of the whole
    text, so they are what the model sees when it answers; where a template renders an answer otherwise once more
    messages follow, or than it asks for it, what it renders in the whole text is learned.

    Args:
        tokenizer: a fast one of transformers.
        template: a chat template in place of the tokenizer's own, or None.
        loss_on: assistant (each of its messages), completion (its last one), or all.
        ends: tokens at which generation stops, such as EOS; what follows them in a message is not learned.
        values: what the template is given beside messages and tools, by name.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        loss_on: str,
        ends: Sequence[int],
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self._template, self._loss_on = tokenizer, template, loss_on
        self._ends, self._values = frozenset(ends), dict(values or {})
        self.notes: dict[str, str] = {}  # what the template does with answers, of the first one of each kind

    def encode(self, conversation: Conversation, place: str) -> ChatTokens:
        """Tokens of one conversation; RequestError where the template renders a message otherwise when more follow."""
        if conversation.messages is None:
            return self._encode_text(conversation)
        self._check_template(place)
        if self._loss_on == "all" and not all(map(is_learned, conversation.messages)):
            raise RequestError(
                f"--data chat: {place} has a message with weight 0 or train false: data.args.loss_on=all learns each",
                remedy="data.args.loss_on=assistant",
            )
        whole = self._render(conversation, conversation.messages, place, asks=False)
        spans = [(0, len(whole))] if self._loss_on == "all" else self._find_answers(conversation, whole, place)
        found = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = found["input_ids"], found["offset_mapping"]
        learned = [False] * len(ids)
        begins, ends = [begin for begin, _ in places], [end for _, end in places]
        latest, earliest = list(accumulate(ends, max)), list(accumulate(reversed(begins), min))[::-1]  # in order
        for first, end in spans:
            near = range(bisect_right(latest, first), bisect_left(earliest, end))
            inside = [at for at in near if begins[at] < end and ends[at] > first]
            stops = [at for at in inside if ids[at] in self._ends]
            for at in inside:
                learned[at] = self._loss_on == "all" or not stops or at <= stops[-1]
            after = inside[-1] + 1 if inside and not stops else len(ids)
            if after < len(ids) and ids[after] in self._ends:  # GLM ends an answer with the role of who speaks next
                learned[after] = True
        return ChatTokens(ids, learned)

    def encode_prompt(self, conversation: Conversation, place: str) -> list[int]:
        """Tokens up to the point where the model answers."""
        if conversation.messages is None:
            return list(self._tokenizer(conversation.prompt)["input_ids"])
        text = self._render(conversation, conversation.messages, place, asks=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_text(self, conversation: Conversation) -> ChatTokens:
        """A plain text, as the tokenizer begins it, and with EOS at its end."""
        prompt, completion = conversation.prompt, conversation.completion
        found = self._tokenizer(prompt + completion, return_offsets_mapping=True)
        ids, places = list(found["input_ids"]), list(found["offset_mapping"])
        end = self._tokenizer.eos_token_id
        if ids and ids[-1] != end:
            ids, places = [*ids, end], [*places, (0, 0)]
        first = 0 if self._loss_on == "all" else len(prompt)
        learned = [stop > first for _, stop in places]
        learned[-1:] = [True]
        return ChatTokens(ids, learned)

    def _find_answers(self, conversation: Conversation, whole: str, place: str) -> list[tuple[int, int]]:
        """First character and end of each message that is learned, in the whole rendered text."""
        messages = conversation.messages or []
        later = range(conversation.num_prompt_messages, len(messages))
        answers = [at for at in later if messages[at]["role"] == "assistant" and is_learned(messages[at])]
        if self._loss_on == "completion":
            answers = [number for number in answers if number == len(messages) - 1]
        if 0 in answers:
            raise RequestError(
                f"--data chat: {place} begins with a message of the assistant: nothing comes before it",
                remedy="a message of a user or system first, or data.args.loss_on=completion",
            )
        known = self._find_by_neighbours(conversation, whole, place) if len(answers) > _FEW else {}
        spans = []
        for number in answers:
            first, end = known.get(number) or self._find_answer(conversation, number, whole, place)
            _check_said(messages[number], whole[first:end], number + 1, place)
            spans.append((first, end))
            self._note_thought(messages[number], whole[first:end], number + 1, place)
        return spans

    def _note_thought(self, message: dict[str, Any], rendered: str, number: int, place: str) -> None:
        thought = message.get("reasoning_content") or "".join(_THOUGHT.findall(message["content"]))
        if _squeeze(thought) not in _squeeze(rendered):
            note = f"{place}: the chat template leaves the thought of message {number} out: it is not learned"
        elif thought and rendered.count("</think>") > 1:
            note = f"{place}: the chat template has a thought of its own before that of message {number}: give it as "
            note += "reasoning_content, not in content"
        else:
            return
        self.notes.setdefault("thought", note)

    def _find_by_neighbours(self, conversation: Conversation, whole: str, place: str) -> dict[int, tuple[int, int]]:
        """First character and end of all answers, for which each message is rendered a few times, however many follow.

        What precedes the first answer is rendered with the answer before, what is between, and the answer. {} where
        these parts are not the whole text, or where the template has it otherwise in the middle or at the end.
        """
        messages, ending = conversation.messages or [], self._tokenizer.eos_token or ""
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        head, latest = messages[: answers[0]], answers[0]
        found, end, known = dict[int, tuple[int, int]](), 0, ""
        if not head:
            return {}
        try:
            for number in answers:
                if found:
                    known = self._render(conversation, [*head, messages[latest]], place, asks=False)
                asked = self._render(conversation, head + messages[latest:number], place, asks=True)
                said = self._render(conversation, head + messages[latest : number + 1], place, asks=False)
                if not asked.startswith(known):
                    known = known.removesuffix(ending)
                if not (asked.startswith(known) and said.startswith(known)):
                    return {}
                asked, said = asked[len(known) :], said[len(known) :]
                if not whole.startswith(said, end):
                    said = said.removesuffix(ending)
                if not (whole.startswith(asked, end) and whole.startswith(said, end)):
                    return {}
                found[number] = end + len(asked), end + len(said)
                latest, end = number, end + len(said)
            checked = (answers[len(answers) // 2], latest)
            same = all(found[number] == self._find_answer(conversation, number, whole, place) for number in checked)
        except RequestError:
            return {}
        return found if same else {}

    def _find_answer(self, conversation: Conversation, number: int, whole: str, place: str) -> tuple[int, int]:
        messages = conversation.messages or []
        before = self._render(conversation, messages[:number], place, asks=True)
        through = whole
        if number + 1 < len(messages):
            through = self._render(conversation, messages[: number + 1], place, asks=False)
            if not whole.startswith(through):  # some end the whole conversation with EOS
                through = through.removesuffix(self._tokenizer.eos_token or "")
        if whole.startswith(before) and whole.startswith(through):
            return len(before), len(through)
        return self._find_rewritten(conversation, number, (before, through, whole), place)

    def _find_rewritten(
        self, conversation: Conversation, number: int, texts: tuple[str, str, str], place: str
    ) -> tuple[int, int]:
        """The same where a template writes an answer otherwise than it asks for it, such as without its thought.

        What stands between the message before and the answer, and behind it, is compared with what asks for the answer,
        and with the text that ends with it.
        """
        messages, (before, through, whole) = conversation.messages or [], texts
        if whole.startswith(before):
            how, shown = f"renders message {number + 1} otherwise when more follow", through
        else:
            how, shown = f"asks for message {number + 1} otherwise than it is rendered", before
        asked, ended = {number - 1: ("", _MARK)}, {number: ("", _MARK)}
        inside = self._find_marks(conversation, messages, asked | {number: (_MARK, _MARK)}, whole, place)
        call = self._find_marks(conversation, messages[:number], asked, before, place, asks=True)
        end = self._find_marks(conversation, messages[: number + 1], ended, through, place)
        if not (inside and call and end):
            raise self._refuse(whole, shown, how, place)
        self.notes.setdefault("rewritten", f"{place}: the chat template {how}; what it renders is learned")
        begun = inside[0] + count_same(whole[inside[0] :], before[call[0] :])
        return min(begun, inside[1]), inside[2] + count_same(whole[inside[2] :], through[end[0] :])

    def _find_marks(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        marks: dict[int, tuple[str, str]],
        text: str,
        place: str,
        *,
        asks: bool = False,
    ) -> list[int]:
        """Where marks before and behind what some messages say, without thoughts, come to stand in the rendered text.

        [] where the template does not render each mark once, or renders what precedes the last one otherwise.
        """
        marked = list(messages)
        for number, (first, last) in marks.items():
            content = messages[number]["content"].rstrip()
            said = content.rpartition("</think>")[2].lstrip()
            marked[number] = messages[number] | {"content": f"{content.removesuffix(said)}{first}{said}{last}"}
        *pieces, _ = self._render(conversation, marked, place, asks=asks).split(_MARK)
        complete = len(pieces) == sum(len("".join(each)) for each in marks.values())
        return list(accumulate(map(len, pieces))) if complete and text.startswith("".join(pieces)) else []

    def _check_template(self, place: str) -> None:
        if not (self._template or self._tokenizer.chat_template):
            raise RequestError(
                f"--data chat: {place} has messages, and the model has no chat template to render them with",
                remedy="a model that is made for chat, or --set data.chat_template=FILE (TRL has some, in Jinja); "
                "a base model learns from records with prompt and completion, or text",
            )

    def _refuse(self, whole: str, text: str, how: str, place: str) -> RequestError:
        at = count_same(whole, text)
        last = "" if self._loss_on == "completion" else "--set data.loss_on=completion, for the last message only, or "
        return RequestError(
            f"--data chat: {place}: the chat template {how}: {text[at : at + _SHOWN]!r} becomes "
            f"{whole[at : at + _SHOWN]!r}, so the trained tokens differ from generated ones",
            remedy=f"{last}a template for training with --set data.chat_template=FILE",
        )

    def _render(self, conversation: Conversation, messages: list[dict[str, Any]], place: str, *, asks: bool) -> str:
        """Messages of a conversation as text; with `asks` up to the point where the model answers."""
        from jinja2 import TemplateError  # late: transformers has loaded it

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=fix_date(self._tokenizer.get_chat_template(self._template, conversation.tools)),
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=asks,
                **self._values,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"--data chat: {place}: the chat template does not take its first {len(messages)} messages ({error})",
                remedy="other roles, or another template with --set data.chat_template=FILE",
            ) from error
        return text


def fix_date(template: str) -> str:
    """A chat template whose strftime_now is on that day: transformers 5.23 passes no functions to templates."""
    if "strftime_now" not in template:
        return template
    replaced = "".join(f"|replace('%{sign}', '{TODAY.strftime(f'%{sign}')}')" for sign in _SIGNS)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def check_template_values(tokenizer: Any, values: Any) -> None:
    """Refuse what is no mapping of names, and names that the tokenizer itself has a use for."""
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise RequestError(
            f"data.args.template_args: {values!r} is not a mapping",
            remedy="of names to values: {enable_thinking: false}",
        )
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *_OWN_VALUES} - {"kwargs"}
    if used := sorted(taken & values.keys()):
        raise RequestError(
            f"data.args.template_args: {used[0]} is set by the data, not by template_args",
            remedy="names that are read by the chat template, such as enable_thinking",
        )


def _check_said(message: dict[str, Any], rendered: str, number: int, place: str) -> None:
    """Refuse a template that leaves out what is to be learned, up to white space and thoughts."""
    content = message["content"].rpartition("</think>")[2]
    wanted = [content, *(call.get("function", call)["name"] for call in message.get("tool_calls", ()))]
    for text in wanted:
        if _squeeze(text) not in _squeeze(rendered):
            raise RequestError(
                f"--data chat: {place}: the chat template leaves {text[:_SHOWN]!r} of message {number} out",
                remedy="a template that renders it, with --set data.chat_template=FILE",
            )


def _squeeze(text: str) -> str:
    """A text without its white space."""
    return "".join(text.split())
