"""The commands that use a run's weights: evaluate, predict, sample; their words on the command line, nothing heavy."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from multigpu_cli.commands.completion import run_argument
from multigpu_cli.commands.options import Command
from multigpu_cli.commands.run_request import asked, parsed, target_of
from multigpu_cli.config.kinds import integer, number

Action = Callable[[], int]

_Run = Annotated[str, run_argument("RUN", "run folder, best.pt, last.pt, or checkpoint")]
_Data = Annotated[str | None, typer.Option(metavar="NAME", help="other data than the run's, as for training")]
_DataDir = Annotated[str | None, typer.Option(metavar="DIR", help="where the data is now")]
_Set = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="an argument of the data: data.args.…")]
_Split = Annotated[str | None, typer.Option(metavar="train|val|test", help="which part (default: test, else val)")]
_Batch = Annotated[str | None, typer.Option(metavar="N", help="samples at once (default: as the run evaluated)")]
_Workers = Annotated[str | None, typer.Option(metavar="N", help="processes (default: one per GPU)")]
_OwnCode = Annotated[bool, typer.Option(help="import the code of yours that the run names")]
_Json = Annotated[bool, typer.Option("--json", help="as JSON")]


def add_to(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Give the front door these commands."""
    app.command(cls=Command)(_evaluate(environ))
    app.command(cls=Command)(_predict(environ))
    app.command(cls=Command)(sample)


def _evaluate(environ: Mapping[str, str]) -> Callable[..., Action]:
    def evaluate(
        run: _Run,
        data: _Data = None,
        data_dir: _DataDir = None,
        set: _Set = None,
        split: _Split = None,
        batch_size: _Batch = None,
        nproc_per_node: _Workers = None,
        own_code: _OwnCode = False,
        as_json: _Json = False,
    ) -> Action:
        """Evaluate a run's best weights, on any number of workers; each sample counts once."""
        given = _given(data, data_dir, set, split, batch_size, nproc_per_node)

        def evaluation() -> int:
            wish = asked(run, given, own_code=own_code)
            from multigpu_cli.commands.evaluate import evaluated, show  # torch loads here

            if found := evaluated(wish, ["evaluate", *wish.words, *(["--json"] if as_json else [])], environ):
                show(found, as_json=as_json)
            return 0

        return evaluation

    return evaluate


def _predict(environ: Mapping[str, str]) -> Callable[..., Action]:
    def predict(
        run: _Run,
        out: Annotated[str, typer.Option(metavar="FILE", help="the table to write: ….csv")],
        data: _Data = None,
        data_dir: _DataDir = None,
        set: _Set = None,
        split: _Split = None,
        batch_size: _Batch = None,
        nproc_per_node: _Workers = None,
        own_code: _OwnCode = False,
    ) -> Action:
        """Write what a run's best weights say of each sample, in order, as a table; on any number of workers."""
        given = _given(data, data_dir, set, split, batch_size, nproc_per_node)

        def prediction() -> int:
            wish, target = asked(run, given, own_code=own_code), target_of(out)
            from multigpu_cli.commands.predict import predicted, show  # torch loads here

            if found := predicted(wish, target, ["predict", *wish.words, "--out", out], environ):
                show(found)
            return 0

        return prediction

    return predict


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


def _given(
    data: str | None,
    data_dir: str | None,
    sets: list[str] | None,
    split: str | None,
    batch_size: str | None,
    workers: str | None,
) -> dict[str, Any]:
    named = {"data": data, "data_dir": data_dir, "set": sets, "split": split, "batch_size": batch_size}
    return named | {"nproc_per_node": workers}
