"""Samples while training: the answers of the model to prompts of the user, at the end of an epoch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from multigpu_cli.data.chat_prompts import Prompt, PromptReader, format_answer
from multigpu_cli.models.generate import answer_prompt
from multigpu_cli.run.published_weights import use_published_weights
from multigpu_cli.run.run import Run
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.runtime.collectives import all_gather_object, broadcast_object
from multigpu_cli.runtime.model_folder import TextModel, find_model_folder, load_text_model
from multigpu_cli.runtime.preserve_module_state import eval_mode, preserve_buffers
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks, run_without_vote

_LENGTH = 256  # tokens of an answer at most
_SHOWN, _WIDTH = 4, 60  # answers on the terminal, and characters of each, as of its prompt


@dataclass(frozen=True)
class PromptSet:
    """What --prompts asks.

    Attributes:
        model: what answers are turned into text with, and the tokens that end them.
        places: tokens of prompt and answer at most.
    """

    prompts: list[Prompt]
    model: TextModel
    places: int


def load_prompts(spec: RunSpec) -> PromptSet | None:
    """Read --prompts, as the chat template of the training renders them; None without it.

    Raises:
        RequestError: the file holds no prompts, or one is wrong.
    """
    if spec.config.log.prompts is None:
        return None
    model = load_text_model(find_model_folder(spec.config.model.dir))
    places, template = model.places or spec.source.input_shape[-1], spec.source.text_model.get("template")
    reader = PromptReader(model, template or None, places, spec.config.data.args.get("template_args"))
    return PromptSet(reader.read_file(Path(spec.config.log.prompts)), model, places)


def sample_prompts(run: Run) -> None:
    """After every so many epochs, and the last, journal the likeliest answer to each prompt; all ranks call it.

    Nothing is drawn, and training goes on as it would without. Each rank answers some of the prompts, one at a time;
    where the model is sharded, all ranks answer all together.
    """
    asked, last = run.prompts, run.finished
    if asked is None or not (last or run.epoch % run.config.log.sample_every == 0):
        return
    model = run.state.eval_model()
    with run.observer.timer.pause(), eval_mode(model), preserve_buffers(model), use_published_weights(run):
        if run.strategy.sharded:
            answers = run_without_vote(run.world, lambda: [_answer(run, model, asked, each) for each in asked.prompts])
        else:
            mine = asked.prompts[run.world.rank :: run.world.size]
            own = run_on_all_ranks(run.world, lambda: [_answer(run, model, asked, each) for each in mine])
            by_rank = all_gather_object(run.world, own)
            answers = [by_rank[at % run.world.size][at // run.world.size] for at in range(len(asked.prompts))]
        run.log.journal.write("samples", epoch=run.epoch, step=run.progress.step, samples=answers)
    for answer in answers[:_SHOWN]:
        run.log.console.note(format_sample(answer))
    if len(answers) > _SHOWN:
        run.log.console.note(f"  … and {len(answers) - _SHOWN} more, in the journal")


def format_sample(sample: Mapping[str, Any]) -> str:
    """A prompt and its answer in a line that does nothing to a terminal."""
    prompt, answer = (_shorten(sample[name]) for name in ("prompt", "answer"))
    return f"  {prompt} → {answer}{'' if sample['ended'] else ' (no end)'}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    plain = "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)
    return plain if len(plain) <= _WIDTH else plain[: _WIDTH - 1] + "…"


def _answer(run: Run, model: nn.Module, asked: PromptSet, prompt: Prompt) -> dict[str, Any]:
    """Prompt and answer as text, and whether the answer has an end."""

    def agree(token: int) -> int:
        run.observer.watchdog.set_position(run.progress.step, "evaluating")
        return int(broadcast_object(run.world, token)) if run.strategy.sharded else token

    with run.state.precision.autocast():
        tokens = answer_prompt(model, prompt.tokens, _LENGTH, asked.places, asked.model.ends, agree=agree)
    text = format_answer(asked.model.tokenizer, tokens)
    return {"prompt": prompt.text, "answer": text, "ended": tokens[-1] in asked.model.ends}
