"""Prompts that a fine-tuned model completes: from a file, or from the command line."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.data.chat_tokens import ChatEncoder
from multigpu_cli.data.conversations import FORMS, Conversation
from multigpu_cli.data.json_lines import JsonLines
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.model_folder import TextModel

_LAYOUT = 'a .jsonl file of {"prompt": …} or {"messages": […]}, or a .txt file with a prompt in each line'


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        text: what was asked last, for people.
        tokens: all that the model is given.
    """

    text: str
    tokens: list[int]


class PromptReader:
    """Turns prompts into tokens, as the model saw them in training.

    Args:
        template: the chat template of the training; None: the tokenizer's own.
        limit: the places that the model knows.
        values: what the template is given beside the messages, as in training.
        raw: prompts are text to go on from, and no messages; so are they where there is no template.
    """

    def __init__(
        self,
        model: TextModel,
        template: str | None,
        limit: int,
        values: Mapping[str, Any] | None = None,
        *,
        raw: bool = False,
    ) -> None:
        self._encoder = ChatEncoder(model.tokenizer, template, "assistant", model.ends, values)
        self._raw, self._limit = raw or not (template or model.tokenizer.chat_template), limit

    def read_text(self, text: str, place: str = "--prompt") -> Prompt:
        """A prompt as the message of a user.

        Raises:
            RequestError: it is empty, or fills all places of the model.
        """
        conversation = Conversation(prompt=text) if self._raw else Conversation([{"role": "user", "content": text}])
        return self._encode(text, conversation, place)

    def read_file(self, path: Path) -> list[Prompt]:
        """The prompts of a .jsonl or .txt file.

        Raises:
            RequestError: there are none, or one is wrong; names its place.
        """
        read = self._read_lines if path.suffix == ".txt" else self._read_records
        try:
            found = list(read(path))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--prompts {path}: {getattr(error, 'strerror', error)}", remedy=_LAYOUT) from error
        if not found:
            raise RequestError(f"--prompts {path}: there is no prompt in it", remedy=_LAYOUT)
        return found

    def _read_lines(self, path: Path) -> Iterator[Prompt]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                yield self.read_text(line, f"--prompts {path}:{number}")

    def _read_records(self, path: Path) -> Iterator[Prompt]:
        records = JsonLines(path)
        for row in range(len(records)):
            try:
                record = records[row]
            except RequestError as error:
                raise RequestError(f"--prompts {error.problem}", remedy=error.remedy) from error
            yield self._read_record(record, f"--prompts {records.describe(row)}")

    def _read_record(self, record: Mapping[str, Any], place: str) -> Prompt:
        asked = record.get("prompt", record.get("messages"))
        if isinstance(asked, str):
            return self.read_text(asked, place)
        try:
            conversation = FORMS["messages"].read({**record, "messages": asked})
        except ValueError as error:
            raise RequestError(f"{place}: {error}", remedy=_LAYOUT) from error
        last = (conversation.messages or [])[-1]
        if last["role"] == "assistant":
            raise RequestError(f"{place}: its last message is the assistant's own", remedy="leave that message out")
        if self._raw:
            raise RequestError(
                f"{place}: messages, and the model has no chat template", remedy="a prompt as plain text"
            )
        return self._encode(last["content"], conversation, place)

    def _encode(self, text: str, conversation: Conversation, place: str) -> Prompt:
        tokens = self._encoder.encode_prompt(conversation, place)
        if not tokens:
            raise RequestError(f"{place} is empty: the model needs a token to start from", remedy="a text")
        if len(tokens) >= self._limit:
            raise RequestError(
                f"{place}: {len(tokens)} tokens leave no room for an answer within {self._limit}",
                remedy="a shorter prompt",
            )
        return Prompt(text, tokens)


def format_answer(tokenizer: Any, tokens: Sequence[int]) -> str:
    """What the model said, without the marks of its template."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text
