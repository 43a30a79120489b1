"""Text from a run's language model."""

from dataclasses import dataclass

import torch
from torch import nn

from multigpu_cli.checkpoint.weights import TrainedWeights, load_trained_weights
from multigpu_cli.commands.inference import LoadedRun, load_run_without_data, load_text_model_of_run
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.errors import RequestError
from multigpu_cli.language.generate import answer_prompt, generate
from multigpu_cli.language.prompts import PromptReader, format_answer
from multigpu_cli.language.text import Numbers, Vocabulary
from multigpu_cli.runtime.model_call import ModelCall

_TASKS = ("language-model", "dpo")
_REMEDY = "a default of None for these parameters of forward, where text is written"


@dataclass(frozen=True)
class Sampling:
    """How text is drawn.

    Attributes:
        count: tokens at most.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw from this many of the likeliest only.
        raw: a prompt is text to go on from, also where the model has a chat template.
    """

    count: int
    temperature: float
    top_k: int | None
    seed: int
    raw: bool


def generate_text(request: InferenceRequest, prompt: str, sampling: Sampling) -> str:
    """The model's answer to the prompt, of one with a chat template; else the prompt and how it goes on.

    The text that the model was trained on is not needed.
    """
    weights = load_trained_weights(request.run)
    task = weights.settings.get("built_for", {}).get("task", _TASKS[0])
    if task not in _TASKS:
        raise RequestError(f"{request.run}: only a language model writes text, and this run's task is {task}")
    run = load_run_without_data(weights, own_code=request.own_code, changes=request.changes)
    run.model.to("cuda" if torch.cuda.is_available() else "cpu")
    if run.config.model.dir is not None:
        return _answer(weights, run, prompt, sampling)
    if missing := ModelCall.of(run.model).required[1:]:
        raise RequestError(f"{request.run}: its network needs {', '.join(missing)} beside the tokens", remedy=_REMEDY)
    return _continue(run, prompt, sampling)


def _answer(weights: TrainedWeights, run: LoadedRun, prompt: str, sampling: Sampling) -> str:
    """Of a fine-tuned model: up to its end, by the chat template of the training."""
    text = load_text_model_of_run(weights, run)
    limit = text.places or run.source.input_shape[-1]  # a training may have had shorter samples
    template = weights.settings.get("base", {}).get("template")
    values = run.config.data.args.get("template_args")
    asked = PromptReader(text, template or None, limit, values, raw=sampling.raw).read_text(prompt)
    said = answer_prompt(
        run.model,
        asked.tokens,
        sampling.count,
        limit,
        text.ends,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        generator=_seed_generator(run.model, sampling.seed),
    )
    return str(text.tokenizer.decode([*asked.tokens, *said])) if sampling.raw else format_answer(text.tokenizer, said)


def _continue(run: LoadedRun, prompt: str, sampling: Sampling) -> str:
    codec = run.source.codec
    vocabulary = codec if isinstance(codec, Vocabulary) else Numbers(run.source.num_classes)
    start = vocabulary.encode(prompt)
    if not start:
        raise RequestError("--prompt is empty: the model needs a token to start from", remedy="--prompt TEXT")
    generator = _seed_generator(run.model, sampling.seed)
    tokens = generate(
        run.model,
        torch.tensor([start], device=generator.device),
        sampling.count,
        run.source.input_shape[-1],
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        generator=generator,
    )
    return vocabulary.decode(tokens[0].tolist())


def _seed_generator(model: nn.Module, seed: int) -> torch.Generator:
    """A generator on the model's device."""
    return torch.Generator(next(model.parameters()).device).manual_seed(seed)
