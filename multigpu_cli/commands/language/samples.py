"""Samples of a language model: what it learns of a file (`data preview`), and the text that it writes (`sample`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TextIO

import torch
from torch import nn

from multigpu_cli.checkpoint.weights import TrainedWeights, load_trained_weights
from multigpu_cli.commands.inference import LoadedRun, load_run_without_data, load_text_model_of_run
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.config.schema import Config
from multigpu_cli.data.load import open_data
from multigpu_cli.errors import RequestError, make_printable
from multigpu_cli.language.chat.samples import SFTDataset
from multigpu_cli.language.model_folder import find_places
from multigpu_cli.language.prompts import Draw, PromptReader, answer_prompt, draw_tokens, format_answer, generate
from multigpu_cli.language.text import Numbers, Vocabulary
from multigpu_cli.runtime.model_call import IGNORED, ModelCall

_MARKS = "⟦", "⟧"
_GREEN = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class Stretch:
    """Text of which all is learned, or nothing."""

    text: str
    learned: bool


@dataclass(frozen=True)
class PreviewedSample:
    """One sample: the place of its record, its tokens before it is cut, those learned, and their text in turn."""

    place: str
    length: int
    truncated: bool
    learned: int
    tokens: list[int]
    stretches: list[Stretch]


@dataclass(frozen=True)
class Preview:
    """The first samples for training, each of at most `max_length` tokens, and what is said of all."""

    data: str
    max_length: int
    samples: list[PreviewedSample]
    warnings: tuple[str, ...]


def preview_data(config: Config, count: int) -> Preview:
    """The first samples for training, as a training with these settings gets them; no worker is started."""
    if config.data.name != "chat":
        problem = f"data preview: --data {config.data.name} has no tokens to preview"
        raise RequestError(problem, remedy="--data chat --data-dir FILE.jsonl --model-dir DIR")
    source = open_data(config)
    train: Any = source.train
    vocabulary = source.codec
    # by themselves, of packs or pairs too
    chats: SFTDataset = getattr(train, "chats", getattr(train, "answers", train))
    assert isinstance(vocabulary, Vocabulary)
    shown = range(min(count * chats.width, len(chats)))
    samples = [_show(chats, index, vocabulary) for index in shown]
    return Preview(source.note.removesuffix("; "), chats.limit, samples, source.warnings)


def choose_marks(output: TextIO, environ: Mapping[str, str]) -> tuple[str, str]:
    """What stands before and after learned text: colours in a terminal that may have them, else signs."""
    return _GREEN if output.isatty() and not environ.get("NO_COLOR") else _MARKS


def format_preview(preview: Preview, marks: tuple[str, str]) -> Iterator[str]:
    """Each sample's place, numbers and text; what is learned stands between the marks."""
    yield from (preview.data, *preview.warnings)
    for sample in preview.samples:
        cut = f", cut to {len(sample.tokens)}" if sample.truncated else ""
        yield ""
        yield f"{sample.place}: {sample.length} tokens{cut}, {sample.learned} learned"
        yield from "".join(each.text.join(marks) if each.learned else each.text for each in sample.stretches).split(
            "\n"
        )


def _show(chats: SFTDataset, index: int, vocabulary: Vocabulary) -> PreviewedSample:
    sample = chats[index]
    tokens, learned = sample["input_ids"].tolist(), sample["labels"] != IGNORED
    changes = (torch.nonzero(learned[1:] != learned[:-1]).flatten() + 1).tolist()
    bounds = list(pairwise([0, *changes, len(tokens)]))
    texts = [vocabulary.decode(tokens[:end])[len(vocabulary.decode(tokens[:first])) :] for first, end in bounds]
    pairs = zip(texts, bounds, strict=True)
    stretches = [Stretch(make_printable(text), bool(learned[first])) for text, (first, _) in pairs]
    length, num_learned = int(chats.lengths[index]), int(chats.learned[index])
    return PreviewedSample(chats.describe(index), length, length > len(tokens), num_learned, tokens, stretches)


_TASKS = ("language-model", "dpo")
_REMEDY = "a default of None for these parameters of forward, where text is written"


@dataclass(frozen=True)
class Sampling:
    """How text is drawn: at most `count` tokens, of the `top_k` likeliest; a temperature of 0 takes the likeliest."""

    count: int
    temperature: float
    top_k: int | None
    seed: int
    raw: bool  # continue the prompt as plain text, even if the model has a chat template


def generate_text(request: InferenceRequest, prompt: str, sampling: Sampling) -> str:
    """The model's answer to the prompt, of one with a chat template; else the prompt and how it goes on."""
    weights = load_trained_weights(request.run)
    task = weights.settings.get("built_for", {}).get("task", _TASKS[0])
    if task not in _TASKS:
        raise RequestError(f"{request.run}: sample needs a language model, and the task of this run is {task}")
    run = load_run_without_data(weights, request)
    run.model.to("cuda" if torch.cuda.is_available() else "cpu")
    if run.config.model.dir is not None:
        return _answer(weights, run, prompt, sampling)
    if missing := ModelCall.of(run.model).required[1:]:
        raise RequestError(f"{request.run}: its network also needs {', '.join(missing)}", remedy=_REMEDY)
    return _continue(run, prompt, sampling)


def _answer(weights: TrainedWeights, run: LoadedRun, prompt: str, sampling: Sampling) -> str:
    """Of a fine-tuned model: up to its end, by the chat template of the training."""
    text = load_text_model_of_run(weights, run)
    limit = find_places(text.config) or run.source.input_shape[-1]  # a training may have had shorter samples
    template = weights.settings.get("base", {}).get("template")
    values = run.config.data.args.get("template_args")
    asked = PromptReader(text, template or None, limit, values, raw=sampling.raw).read_text(prompt)
    draw, _ = _begin_to_draw(run.model, sampling)
    said = answer_prompt(run.model, asked.tokens, sampling.count, limit, text.ends, draw)
    return str(text.tokenizer.decode([*asked.tokens, *said])) if sampling.raw else format_answer(text.tokenizer, said)


def _continue(run: LoadedRun, prompt: str, sampling: Sampling) -> str:
    codec = run.source.codec
    vocabulary = codec if isinstance(codec, Vocabulary) else Numbers(run.source.num_classes)
    start = vocabulary.encode(prompt)
    if not start:
        raise RequestError("--prompt is empty: the model needs a token to start from", remedy="--prompt TEXT")
    draw, device = _begin_to_draw(run.model, sampling)
    begun = torch.tensor([start], device=device)
    tokens = generate(run.model, begun, sampling.count, run.source.input_shape[-1], draw)
    return vocabulary.decode(tokens[0].tolist())


def _begin_to_draw(model: nn.Module, sampling: Sampling) -> tuple[Draw, torch.device]:
    """What draws tokens, seeded, and the model's device, where it does so."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(sampling.seed)
    draw = partial(draw_tokens, temperature=sampling.temperature, top_k=sampling.top_k, generator=generator)
    return draw, generator.device
