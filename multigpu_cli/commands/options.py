"""The settings as command-line options, their completion by the shell, and a command's output as text or JSON."""

import glob
import inspect
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from multigpu_cli.capabilities import DATASETS, ENVIRONMENTS, LOGGERS, METRICS, MODELS, TASKS
from multigpu_cli.checkpoint.files import flush_folder
from multigpu_cli.commands.help import GENERAL, HelpPage, build_help_all_option, describe_setting
from multigpu_cli.config.paths import find_recipes
from multigpu_cli.config.schema import SETTINGS
from multigpu_cli.config.types import Setting
from multigpu_cli.errors import RequestError, did_you_mean, make_line
from multigpu_cli.monitor.journal import dump_json

_EXTRA: tuple[tuple[str, Any, str, str], ...] = (
    ("config", str, "FILE|NAME", "load settings from a YAML file or a recipe"),
    ("set", list[str], "KEY=VALUE", "set one setting by its YAML key, e.g. model.args.depth=4; may be repeated"),
    ("no_amp", bool, "", "the same as --amp off"),
    ("dry_run", bool, "", "show the plan and try one batch; train nothing"),
    ("print_config", bool, "", "print all settings as YAML and exit"),
    ("quiet", bool, "", "print the result only"),
    ("verbose", bool, "", "also print versions, sizes, every number and each checkpoint"),
    ("json", bool, "", "print the result as JSON, and nothing else"),
    ("debug", bool, "", "show full error messages and tracebacks"),
    ("version", bool, "", "print the version and exit"),
)


def option(metavar: str, help: str, *names: str, **more: Any) -> Any:
    """Declare an option; without `names` it is named after the parameter, and a switch has no metavar."""
    return typer.Option(*names, metavar=metavar or None, help=help, **more)


CHANGES: dict[str, Any] = {
    "data": Annotated[str | None, option("NAME", "another dataset than the run's, as in training")],
    "data_dir": Annotated[str | None, option("PATH", "new location of the dataset")],
    "model": Annotated[str | None, option("NAME", "own model of the run: allows its import")],
    "task": Annotated[str | None, option("NAME", "own task of the run: allows its import")],
    "model_dir": Annotated[str | None, option("PATH", "new location of the pretrained model")],
    "set": Annotated[list[str] | None, option("KEY=VALUE", "an argument, as data.args.NAME=VALUE")],
}
_INFERENCE = CHANGES | {
    "split": Annotated[str | None, option("train|val|test", "split (default: test, else val)")],
    "batch_size": Annotated[str | None, option("N", "batch size (default: twice the run's)")],
    "nproc_per_node": Annotated[str | None, option("N", "processes (default: one per GPU)")],
}


class _RawText:
    """Replaces Typer's parsing of values: options stay text, which config/types.py parses for all sources."""

    def coerce(self, value: Any, **_: Any) -> Any:
        return value


class Command(HelpPage, TyperCommand):
    """A command: values of its options stay text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(_skip_value_parsing(self, ctx), args)

    def invoke(self, ctx: Any) -> Any:
        """Return the call for main_multi_gpu.py to make: click would handle Ctrl-C and a broken pipe itself."""
        return partial(super().invoke, ctx)


class Group(HelpPage, TyperGroup):
    """The main command: its sub-commands, and an error for unknown ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse without Typer's own parsing of values; refuse shell completion of `python FILE`: no shell has it."""
        if " " in (ctx.info_name or "") and (wish := {"--install-completion", "--show-completion"} & set(args)):
            problem = f"{wish.pop()}: shells complete the installed program only"
            raise RequestError(problem, remedy="pip install . and then multigpu --install-completion")
        return super().parse_args(_skip_value_parsing(self, ctx), args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the sub-command; raise RequestError if it does not exist."""
        if args[0] not in self.commands:
            near = did_you_mean(args[0], self.commands)
            raise RequestError(f"{args[0]!r} is not a command", remedy=f"{near} (a value must follow its flag)")
        return super().resolve_command(ctx, args)


def with_train_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a Typer command all train options; it gets them as keywords, those not given as None, False or empty."""
    extra = [_build_option(*each, GENERAL) for each in _EXTRA]
    settings = [_build_setting_option(each) for each in SETTINGS.values() if each.flag]
    return _with_options(command, [*extra, *settings, build_help_all_option()])


def with_inference_options(
    command: Callable[..., Any], options: Mapping[str, Any] = MappingProxyType(_INFERENCE)
) -> Callable[..., Any]:
    """Give a Typer command the options of a pass over a dataset; it gets them as keywords, those not given as None."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, keyword, default=None, annotation=each) for name, each in options.items()]
    return _with_options(command, more)


def _with_options(command: Callable[..., Any], more: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """Replace the command's **values by these options, after its own parameters."""
    own = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
    command.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    return command


def list_given_flags(values: Mapping[str, Any]) -> list[str]:
    """The flags that were given on the command line."""
    return ["--" + key.replace("_", "-") for key, value in values.items() if value not in (None, False, [])]


def reject_idle_flags(command: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse the options of a training that have no effect in this command; returns the values."""
    idle = {name: values[name] for name in ("dry_run", "print_config", "quiet", "verbose", "version")}
    if flags := list_given_flags(idle):
        raise RequestError(f"{command} does not accept {flags[0]}", remedy=f"{command} without {flags[0]}")
    return values


def _build_setting_option(setting: Setting) -> inspect.Parameter:
    kind: Any = bool if setting.default is False else list[str] if setting.default == () else str
    return _build_option(setting.key, kind, setting.kind.metavar, describe_setting(setting), setting.panel)


def _skip_value_parsing(command: Any, ctx: Any) -> Any:
    """Typer 0.29 would load pydantic to parse values: 0.1 s of CPU per call. (Other versions ignore this.)"""
    for option in command.get_params(ctx):
        option._runtime_param = _RawText()
    return ctx


def _build_option(name: str, kind: Any, metavar: str, help: str, panel: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    looks = {"rich_help_panel": panel, "show_default": False, "autocompletion": offer_for(name, metavar)}
    declared, keyword = option(metavar, help, flag, **looks), inspect.Parameter.KEYWORD_ONLY
    default, kind = (False, bool) if kind is bool else (None, kind | None)
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, declared])


Offer = Callable[[str], list[str]]
"""From an incomplete word (Typer calls the parameter by this name) to the words that complete it."""


def offer_for(key: str, metavar: str) -> Offer | None:
    """What an option offers, such as the words in its auto|on|off; None leaves it to the shell, which offers files."""
    offers: dict[str, Offer] = {
        "data": _complete_from([*DATASETS, *ENVIRONMENTS]),
        "model": _complete_from(MODELS),
        "task": _complete_from(TASKS),
        "metric": _complete_from(METRICS),
        "logger": _complete_from(LOGGERS),
        "config": lambda incomplete: _complete_from(find_recipes())(incomplete),  # late: reads folders
        "set": _complete_from(f"{key}=" for key in SETTINGS),
        "save_dir": complete_run_folders,
        "resume": lambda incomplete: _complete_from(("auto", "never"))(incomplete) + complete_run_folders(incomplete),
    }
    choices = [word for word in metavar.split("|") if re.fullmatch("[a-z][a-z0-9-]*", word)]
    return offers.get(key) or (_complete_from(choices) if choices else None)


def run_argument(metavar: str, help: str) -> Any:
    """Declare the positional argument that is the folder of a run."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete_run_folders)


def complete_run_folders(incomplete: str) -> list[str]:
    """Run folders that continue the typed path, one level below it, or in checkpoints/ where runs go by default."""
    head, slash, name = incomplete.rpartition("/")
    place, begun = Path(head + slash or "."), glob.escape(name)
    patterns = [f"{begun}*/journal.jsonl", f"{begun}*/*/journal.jsonl"]
    if not slash and "checkpoints".startswith(name):
        patterns.append("checkpoints/*/*/journal.jsonl")
    folders = {file.parent.relative_to(place) for pattern in patterns for file in place.glob(pattern)}
    return sorted(f"{head}{slash}{folder}" for folder in folders)


def _complete_from(words: Iterable[str]) -> Offer:
    known = sorted(words)
    return lambda incomplete: [word for word in known if word.startswith(incomplete)]


def print_result(result: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result: as JSON (plain data, dataclasses of it, paths), or else the lines that show it.

    Each of these stays one line: names and texts in them may come from a stranger's file.
    """
    print(dump_json(result, indent=2) if as_json else "\n".join(map(make_line, lines)), flush=True)


def name_draft(target: Path) -> Path:
    """Where a new file or folder is written until it is whole."""
    return target.with_name(f".{target.name}.unchecked")


@contextmanager
def draft_of(flag: str, target: Path) -> Iterator[Path]:
    """Yield the draft of a new file or folder; it gets the target's name once it is on the disk, or goes on an error.

    Its name can be guessed. Nothing of that name exists at the start, and inside it is created by `open_new`, `publish`
    or `mkdir`, none of which follows a link.
    """
    draft = name_draft(target)
    with writing_to(flag, target):
        _remove(draft)  # left by a process that was killed, or planted by somebody
    try:
        yield draft
        with writing_to(flag, target):
            for path in (*draft.rglob("*"), draft):
                flush_folder(path)
            draft.replace(target)
            flush_folder(target.parent)
    finally:
        with writing_to(flag, target):
            _remove(draft)


def _remove(path: Path) -> None:
    """Remove a file, a folder or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def writing_to(flag: str, target: Path) -> Iterator[None]:
    """Report a write that fails inside as a wrong value of the flag that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"{flag} {target}: {error.strerror or error}", remedy=f"another {flag}") from error
