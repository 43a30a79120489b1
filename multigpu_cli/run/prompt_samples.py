"""Samples while training: the answers of the model to prompts of the user, at the end of an epoch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from multigpu_cli.data.chat_prompts import Prompt, PromptReader, format_answer
from multigpu_cli.models.generate import answer_prompt
from multigpu_cli.run.part import Part
from multigpu_cli.run.published_weights import use_published_weights
from multigpu_cli.run.run import Run
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.runtime.collectives import all_gather_object, broadcast_object
from multigpu_cli.runtime.model_folder import find_model_folder, load_text_model
from multigpu_cli.runtime.preserve_module_state import eval_mode, preserve_buffers
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks, run_without_vote
from multigpu_cli.runtime.world import World

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
        self.places, template = model.places or spec.source.input_shape[-1], spec.source.text_model.get("template")
        reader = PromptReader(model, template or None, self.places, spec.config.data.args.get("template_args"))
        return reader.read_file(Path(str(spec.config.log.prompts)))

    def epoch_end(self, run: Run) -> None:
        """After every so many epochs, and the last, journal the likeliest answer to each prompt.

        Nothing is drawn, and training goes on as it would without. Each rank answers some of the prompts, one at a
        time; where the model is sharded, all ranks answer all together.
        """
        if not (run.finished or run.epoch % run.config.log.sample_every == 0):
            return
        model, world = run.state.eval_model(), run.world
        with run.observer.timer.pause(), eval_mode(model), preserve_buffers(model), use_published_weights(run):
            if run.strategy.sharded:
                answers = run_without_vote(world, lambda: [self._answer(run, model, each) for each in self.prompts])
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
