"""Prompts, from a file or the command line, that a model completes token by token; --prompts does so as it learns."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multigpu_cli.config.regular_files import refuse_special_file
from multigpu_cli.data.files import JsonLines
from multigpu_cli.distributed.world import World, all_gather_object, broadcast_object, run_in_step, run_on_all_ranks
from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.conversations import FORMS, Conversation
from multigpu_cli.language.chat.encoder import ChatEncoder
from multigpu_cli.language.model_folder import TextModel, find_model_folder, find_places, load_text_model
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.run.run import Run, use_published_weights
from multigpu_cli.runtime.module_state import eval_mode, preserve_buffers

_LAYOUT = 'a .jsonl file of {"prompt": …} or {"messages": […]}, or a .txt file with a prompt in each line'


class Prompt(NamedTuple):
    """A prompt: the text that was asked last, for people, and all tokens that the model is given."""

    text: str
    tokens: list[int]


class PromptReader:
    """Turns prompts into tokens, as the model saw them in training.

    The template is that of the training, None for the tokenizer's own; `values` are its variables other than the
    messages. `limit` is the number of positions of the model. Raw prompts are text to continue, not messages; without a
    template, all prompts are raw.
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
        """Return a prompt, a user's message unless raw; RequestError if it is empty, or leaves no room to answer."""
        conversation = Conversation(prompt=text) if self._raw else Conversation([{"role": "user", "content": text}])
        return self._encode(text, conversation, place)

    def read_file(self, path: Path) -> list[Prompt]:
        """Return the prompts of a .jsonl or .txt file; RequestError if it contains no prompts, or an invalid one."""
        refuse_special_file(path, "--prompts")
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
            problem = f"{place}: {len(tokens)} tokens leave no room for an answer within {self._limit}"
            raise RequestError(problem, remedy="a shorter prompt")
        return Prompt(text, tokens)


def draw_tokens(
    logits: Tensor, temperature: float = 0.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """The following token of each of (n, vocabulary) logits: (n, 1) int64.

    It is drawn from the `top_k` likeliest, or from all; the temperature divides the logits, and 0 takes the likeliest.
    """
    if temperature == 0:
        return logits.argmax(1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)


Draw = Callable[[Tensor], Tensor]  # chooses the following tokens from logits, as `draw_tokens` does


@torch.no_grad()  # not inference_mode: training may continue with tensors that the model caches in these passes
def generate(model: nn.Module, tokens: Tensor, count: int, length: int, draw: Draw = draw_tokens) -> Tensor:
    """Extend sequences by tokens that are drawn from the model's predictions: (n, t) → (n, t + count) int64.

    Args:
        model: (n, t) int64 → (n, t, vocabulary) logits, in evaluation mode.
        tokens: (n, t) int64, at least one each.
        length: the model's context length.
    """
    for _ in range(count):
        tokens = torch.cat([tokens, draw(model(tokens[:, -length:])[:, -1].float())], dim=1)
    return tokens


@torch.no_grad()
def answer_prompt(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    length: int,
    ends: Collection[int],
    draw: Draw = draw_tokens,
    *,
    agree: Callable[[int], int] = lambda token: token,
) -> list[int]:
    """At most `count` tokens that a network of transformers adds to a prompt, up to an end, which is the last of them.

    The model takes a mapping with input_ids and position_ids, (1, t) int64 → logits (1, t, vocabulary), in evaluation
    mode; where it has a `make_cache`, keys and values of earlier places are computed once. It stops at the last of the
    `length` places that it knows. `agree` is called with each token, and returns the one to go on with: processes that
    run the model together have to take the same.
    """
    device = next(model.parameters()).device
    cache: dict[str, Any] = getattr(model, "make_cache", dict)()
    answer: list[int] = []
    while len(answer) < min(count, length - len(prompt)) and not (answer and answer[-1] in ends):
        new = answer[-1:] if answer and cache else [*prompt, *answer]
        places = range(len(prompt) + len(answer) - len(new), len(prompt) + len(answer))
        inputs: dict[str, Any] = {"input_ids": new, "position_ids": list(places)}
        inputs = {name: torch.tensor([values], device=device) for name, values in inputs.items()}
        if cache:
            inputs |= cache | {"use_cache": True}
        logits = model(inputs)[:, -1].float()
        if any(each.get_seq_length() <= places[-1] for each in cache.values()):  # the network has another kind of state
            cache = {}
        answer.append(agree(int(draw(logits))))
    return answer


def format_answer(tokenizer: Any, tokens: Sequence[int]) -> str:
    """What the model said, without the marks of its template."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


_LENGTH = 256  # tokens of an answer at most
_SHOWN, _WIDTH = 4, 60  # answers on the terminal, and characters of each, as of its prompt


class PromptSamples(Part):
    """What --prompts asks, by the chat template of the training; prompt and answer have `places` tokens at most."""

    def __init__(self, spec: RunSpec, world: World) -> None:
        self.prompts: list[Prompt] = run_on_all_ranks(world, lambda: self._read(spec))

    def _read(self, spec: RunSpec) -> list[Prompt]:
        self.model = model = load_text_model(find_model_folder(spec.config.model.dir))
        self.places = find_places(model.config) or spec.source.input_shape[-1]
        template, values = spec.source.codec.record.get("template"), spec.config.data.args.get("template_args")
        reader = PromptReader(model, template or None, self.places, values)
        return reader.read_file(Path(str(spec.config.log.prompts)))

    def epoch_end(self, run: Run) -> None:
        """After every so many epochs, and the last, journal the likeliest answer to each prompt.

        Nothing is drawn, and training goes on as it would without. Each rank answers some of the prompts, one at a
        time; where the model is sharded, all ranks answer all together.
        """
        if not (run.finished or run.epoch % run.config.log.sample_every == 0):
            return
        world = run.world
        with run.observer.timer.pause(), use_published_weights(run) as model, eval_mode(model):
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

        with preserve_buffers(model), run.state.precision.autocast():  # the next prompt may be another rank's
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
