"""Prompts, from a file or the command line, that a model completes; --prompts does so while it learns."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from multigpu_cli.data.files import JsonLines
from multigpu_cli.distributed.collectives import all_gather_object, broadcast_object, run_in_step, run_on_all_ranks
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.conversations import FORMS, Conversation
from multigpu_cli.language.chat.encoder import ChatEncoder
from multigpu_cli.language.generate import answer_prompt
from multigpu_cli.language.model_folder import TextModel, find_model_folder, load_text_model
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.run.run import Run, use_published_weights
from multigpu_cli.runtime.module_state import eval_mode, preserve_buffers

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


_LENGTH = 256  # tokens of an answer at most
_SHOWN, _WIDTH = 4, 60  # answers on the terminal, and characters of each, as of its prompt


class PromptSamples(Part):
    """What --prompts asks.

    Attributes:
        prompts: as the chat template of the training renders them.
        model: what answers are turned into text with, and the tokens that end them.
        places: tokens of prompt and answer at most.
    """

    def __init__(self, spec: RunSpec, world: World) -> None:
        self.prompts: list[Prompt] = run_on_all_ranks(world, lambda: self._read(spec))

    def _read(self, spec: RunSpec) -> list[Prompt]:
        self.model = model = load_text_model(find_model_folder(spec.config.model.dir))
        self.places, template = model.places or spec.source.input_shape[-1], spec.source.codec.record.get("template")
        reader = PromptReader(model, template or None, self.places, spec.config.data.args.get("template_args"))
        return reader.read_file(Path(str(spec.config.log.prompts)))

    def epoch_end(self, run: Run) -> None:
        """After every so many epochs, and the last, journal the likeliest answer to each prompt.

        Nothing is drawn, and training goes on as it would without. Each rank answers some of the prompts, one at a
        time; where the model is sharded, all ranks answer all together.
        """
        if not (run.finished or run.epoch % run.config.log.sample_every == 0):
            return
        world = run.world
        with run.observer.timer.pause(), use_published_weights(run) as model, eval_mode(model), preserve_buffers(model):
            if run.strategy.sharded:
                answers = run_in_step(world, lambda: [self._answer(run, model, each) for each in self.prompts])
            else:
                mine = self.prompts[world.rank :: world.size]
                own = run_on_all_ranks(world, lambda: [self._answer(run, model, each) for each in mine])
                by_rank = all_gather_object(world, own)
                answers = [by_rank[at % world.size][at // world.size] for at in range(len(self.prompts))]
            run.log.journal.write("samples", epoch=run.epoch, step=run.progress.step, samples=answers)
        for answer in answers[:_SHOWN]:
            run.log.console.note(format_sample(answer))
        if len(answers) > _SHOWN:
            run.log.console.note(f"  … and {len(answers) - _SHOWN} more, in the journal")

    def _answer(self, run: Run, model: nn.Module, prompt: Prompt) -> dict[str, Any]:
        """Prompt and answer as text, and whether the answer has an end."""

        def agree(token: int) -> int:
            run.observer.watchdog.set_position(run.progress.step, "evaluating")
            return int(broadcast_object(run.world, token)) if run.strategy.sharded else token

        with run.state.precision.autocast():
            tokens = answer_prompt(model, prompt.tokens, _LENGTH, self.places, self.model.ends, agree=agree)
        text = format_answer(self.model.tokenizer, tokens)
        return {"prompt": prompt.text, "answer": text, "ended": tokens[-1] in self.model.ends}


def format_sample(sample: Mapping[str, Any]) -> str:
    """A prompt and its answer in a line that does nothing to a terminal."""
    prompt, answer = (_shorten(sample[name]) for name in ("prompt", "answer"))
    return f"  {prompt} → {answer}{'' if sample['ended'] else ' (no end)'}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    plain = "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)
    return plain if len(plain) <= _WIDTH else plain[: _WIDTH - 1] + "…"
