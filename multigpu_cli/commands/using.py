"""The commands that use a run's weights: evaluate, predict, sample; their words on the command line, nothing heavy."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from multigpu_cli.commands.completion import run_argument
from multigpu_cli.commands.options import Command
from multigpu_cli.commands.run_request import asked, parsed, target_of
from multigpu_cli.config.kinds import integer, number

Action = Callable[[], int]

_Run = Annotated[str, run_argument("RUN", "run folder, best.pt, last.pt, or checkpoint")]
_OwnCode = Annotated[bool, typer.Option(help="import the code of yours that the run names")]
_Json = Annotated[bool, typer.Option("--json", help="as JSON")]
_PASS: dict[str, Any] = {
    "data": Annotated[str | None, typer.Option(metavar="NAME", help="other data than the run's, as for training")],
    "data_dir": Annotated[str | None, typer.Option(metavar="DIR", help="where the data is now")],
    "set": Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="an argument of the data: data.args.…")],
    "split": Annotated[str | None, typer.Option(metavar="train|val|test", help="which part (default: test, else val)")],
    "batch_size": Annotated[str | None, typer.Option(metavar="N", help="samples at once (default: twice the run's)")],
    "nproc_per_node": Annotated[str | None, typer.Option(metavar="N", help="processes (default: one per GPU)")],
}
"""Options of a pass over a dataset."""


def add_to(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Give the front door these commands."""
    app.command(cls=Command)(_evaluate(environ))
    app.command(cls=Command)(_predict(environ))
    app.command(cls=Command)(sample)


def _evaluate(environ: Mapping[str, str]) -> Callable[..., Action]:
    @_with_options_of_a_pass
    def evaluate(run: _Run, *, own_code: _OwnCode = False, as_json: _Json = False, **given: Any) -> Action:
        """Evaluate a run's best weights, on any number of workers; each sample counts once."""

        def evaluation() -> int:
            wish = asked(run, given, own_code=own_code)
            from multigpu_cli.commands.evaluate import evaluated, show  # torch loads here

            if found := evaluated(wish, ["evaluate", *wish.words, *(["--json"] if as_json else [])], environ):
                show(found, as_json=as_json)
            return 0

        return evaluation

    return evaluate


def _predict(environ: Mapping[str, str]) -> Callable[..., Action]:
    @_with_options_of_a_pass
    def predict(
        run: _Run,
        *,
        out: Annotated[str, typer.Option(metavar="FILE", help="the table to write: ….csv")],
        own_code: _OwnCode = False,
        **given: Any,
    ) -> Action:
        """Write what a run's best weights say of each sample, in order, as a table; on any number of workers."""

        def prediction() -> int:
            wish, target = asked(run, given, own_code=own_code), target_of(out)
            from multigpu_cli.commands.predict import predicted, show  # torch loads here

            if found := predicted(wish, target, ["predict", *wish.words, "--out", out], environ):
                show(found)
            return 0

        return prediction

    return predict


def _with_options_of_a_pass(command: Callable[..., Action]) -> Callable[..., Action]:
    """The options of _PASS beside the command's own; it receives them as keywords, absent ones as None."""
    own = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, keyword, default=None, annotation=each) for name, each in _PASS.items()]
    command.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    return command


def sample(
    run: _Run,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="what the text begins with")] = "\n",
    length: Annotated[str, typer.Option(metavar="N", help="tokens to add")] = "500",
    temperature: Annotated[
        str, typer.Option(metavar="X", help="below 1: more of the likely; 0: the likeliest")
    ] = "0.8",
    top_k: Annotated[str | None, typer.Option(metavar="N", help="draw from so many of the likeliest only")] = None,
    seed: Annotated[str, typer.Option(metavar="N", help="of the draws")] = "42",
    own_code: _OwnCode = False,
) -> Action:
    """Let a run's language model write text."""

    def sampling() -> int:
        wish = asked(run, {}, own_code=own_code)
        draws = {
            "count": parsed(integer(1, 10**6), "--length", length),
            "temperature": parsed(number(0, 100), "--temperature", temperature),
            "top_k": parsed(integer(1, 10**6), "--top-k", top_k),
            "seed": parsed(integer(0), "--seed", seed),
        }
        from multigpu_cli.commands.sample import show, written  # torch loads here

        show(written(wish, prompt, **draws))
        return 0

    return sampling
