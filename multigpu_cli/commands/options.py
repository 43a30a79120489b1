"""The settings as command-line options: one table for training and for every command that needs a configuration."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from multigpu_cli.commands import completion
from multigpu_cli.config.schema import SETTINGS, Setting
from multigpu_cli.errors import RequestError, did_you_mean

_CALL = "This call"
_EXTRA: tuple[tuple[str, Any, str, str], ...] = (
    ("config", str, "FILE|NAME", "settings from a YAML file, or a recipe by name"),
    ("set", list[str], "KEY=VALUE", "one setting by its YAML key, e.g. model.args.depth=4; may be repeated"),
    ("no_amp", bool, "", "the same as --amp off"),
    ("dry_run", bool, "", "show the plan and stop before the first step"),
    ("print_config", bool, "", "print all settings as YAML and stop"),
    ("quiet", bool, "", "only the result"),
    ("verbose", bool, "", "also versions, sizes, every number, each checkpoint"),
    ("json", bool, "", "only the summary, as JSON"),
    ("debug", bool, "", "show tracebacks"),
    ("version", bool, "", "print the version and stop"),
)


class _AsWritten:
    """Stands in for Typer's own reading of values: ours are text, and kinds.py reads them for every source alike."""

    def coerce(self, value: Any, **_: Any) -> Any:
        return value


class Command(TyperCommand):
    """A command whose help lists its options in their panels, as plain text: whole names, quick to draw, to grep."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse without Typer's reading of values."""
        return super().parse_args(_unread(self, ctx), args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section a panel, in the order of the table."""
        _write_panels(self, ctx, formatter)


class Group(TyperGroup):
    """The front door's command: its options in panels, its sub-commands, and a word about unknown ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse without Typer's reading of values.

        Raises:
            RequestError: shell completion for `python FILE`, of which no shell knows.
        """
        if " " in (ctx.info_name or "") and (wish := {"--install-completion", "--show-completion"} & set(args)):
            raise RequestError(
                f"{wish.pop()}: shells complete the installed program only",
                remedy="pip install . and then multigpu --install-completion",
            )
        return super().parse_args(_unread(self, ctx), args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section a panel, then the sub-commands."""
        _write_panels(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the sub-command.

        Raises:
            RequestError: there is none of that name.
        """
        if args[0] not in self.commands:
            near = did_you_mean(args[0], [*self.commands, "train"])
            remedy = "no command at all: without one it trains" if "train'" in near else near.replace(", train", "")
            raise RequestError(
                f"{args[0]!r} is no command", remedy=f"{remedy} (a flag's value stands right after its flag)"
            )
        return super().resolve_command(ctx, args)


def with_train_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a Typer command all train options; it receives them as keywords, absent ones as None, False or empty.

    Its own keyword-only parameters stay, and are listed first.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    extra = [_option(name, kind, metavar, help, _CALL) for name, kind, metavar, help in _EXTRA]
    settings = [_of(setting) for setting in SETTINGS.values() if setting.flag]
    command.__signature__ = inspect.Signature([context, *own, *extra, *settings])  # type: ignore[attr-defined]
    return command


def written(values: Mapping[str, Any]) -> list[str]:
    """The flags that stand on the command line."""
    return ["--" + key.replace("_", "-") for key, value in values.items() if value not in (None, False, [])]


def without_idle(command: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a command that takes those of a training, but can do nothing with some of them."""
    idle = {name: values[name] for name in ("dry_run", "print_config", "quiet", "verbose", "version")}
    if flags := written(idle):
        raise RequestError(f"{command} {flags[0]}: there is no such thing", remedy=f"{command} without {flags[0]}")
    return values


def _of(setting: Setting) -> inspect.Parameter:
    kind: Any = bool if setting.default is False else list[str] if setting.default == () else str
    default = "" if setting.default in (None, False, ()) else f" [default: {_plain(setting.default)}]"
    return _option(setting.key, kind, setting.kind.metavar, setting.help + default, setting.panel)


def _unread(command: Any, ctx: Any) -> Any:
    """Typer 0.29 would load pydantic to read values: 0.1 s of CPU a call. (Other versions know no such name.)"""
    for option in command.get_params(ctx):
        option._runtime_param = _AsWritten()
    return ctx


def _write_panels(command: Any, ctx: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str]]] = {}
    for option in command.get_params(ctx):
        if record := option.get_help_record(ctx):
            panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(record)
    for panel, records in panels.items():
        with formatter.section(panel):
            formatter.write_dl(records)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _option(name: str, kind: Any, metavar: str, help: str, panel: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    option = typer.Option(
        flag,
        metavar=metavar or None,
        help=help,
        rich_help_panel=panel,
        show_default=False,
        autocompletion=completion.of(name, metavar),
    )
    default = False if kind is bool else None
    annotation = bool if kind is bool else kind | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )
