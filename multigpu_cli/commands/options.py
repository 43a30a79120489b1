"""The settings as command-line options, the same for training and for every command that needs a configuration."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from multigpu_cli.commands import completion
from multigpu_cli.config.schema import SETTINGS
from multigpu_cli.config.setting import Setting
from multigpu_cli.errors import RequestError, did_you_mean

_CALL = "This call"
_EXTRA: tuple[tuple[str, Any, str, str], ...] = (
    ("config", str, "FILE|NAME", "settings from a YAML file, or a recipe by name"),
    ("set", list[str], "KEY=VALUE", "one setting by its YAML key, e.g. model.args.depth=4; may be repeated"),
    ("no_amp", bool, "", "the same as --amp off"),
    ("dry_run", bool, "", "show the plan, try a batch, and train nothing"),
    ("print_config", bool, "", "print all settings as YAML and stop"),
    ("quiet", bool, "", "only the result"),
    ("verbose", bool, "", "also versions, sizes, every number, each checkpoint"),
    ("json", bool, "", "only the summary, as JSON"),
    ("debug", bool, "", "show tracebacks"),
    ("version", bool, "", "print the version and stop"),
)

_INFERENCE: dict[str, Any] = {
    "data": Annotated[str | None, typer.Option(metavar="NAME", help="other data than the run's, as for training")],
    "data_dir": Annotated[str | None, typer.Option(metavar="PATH", help="folder or file where the data is now")],
    "model_dir": Annotated[str | None, typer.Option(metavar="PATH", help="where the run's pretrained model is now")],
    "set": Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="an argument of the data: data.args.…")],
    "split": Annotated[str | None, typer.Option(metavar="train|val|test", help="which part (default: test, else val)")],
    "batch_size": Annotated[str | None, typer.Option(metavar="N", help="samples at once (default: twice the run's)")],
    "nproc_per_node": Annotated[str | None, typer.Option(metavar="N", help="processes (default: one per GPU)")],
}


class _RawText:
    """Replaces Typer's parsing of values: options stay text, which config/types.py parses for all sources."""

    def coerce(self, value: Any, **_: Any) -> Any:
        return value


class Command(TyperCommand):
    """A command whose help lists its options by panel, as plain text: names are whole, and it is fast."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse without Typer's own parsing of values."""
        return super().parse_args(_skip_value_parsing(self, ctx), args)

    def invoke(self, ctx: Any) -> Any:
        """Return the call for main_multi_gpu.py to make: click would handle Ctrl-C and a broken pipe itself."""
        return partial(super().invoke, ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each panel, in the order of the options."""
        _write_panels(self, ctx, formatter)


class Group(TyperGroup):
    """The main command: its options by panel, its sub-commands, and an error for unknown ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse without Typer's own parsing of values.

        Raises:
            RequestError: shell completion was asked for `python FILE`, which no shell can complete.
        """
        if " " in (ctx.info_name or "") and (wish := {"--install-completion", "--show-completion"} & set(args)):
            raise RequestError(
                f"{wish.pop()}: shells complete the installed program only",
                remedy="pip install . and then multigpu --install-completion",
            )
        return super().parse_args(_skip_value_parsing(self, ctx), args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each panel, then the sub-commands."""
        _write_panels(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the sub-command.

        Raises:
            RequestError: there is none of that name.
        """
        if args[0] not in self.commands:
            near = did_you_mean(args[0], [*self.commands, *([] if ctx.parent else ["train"])])
            remedy = "no command at all: without one it trains" if "train'" in near else near.replace(", train", "")
            raise RequestError(f"{args[0]!r} is no command", remedy=f"{remedy} (a value directly follows its flag)")
        return super().resolve_command(ctx, args)


def with_train_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a Typer command all train options; it gets them as keywords, those not given as None, False or empty."""
    extra = [_build_option(name, kind, metavar, help, _CALL) for name, kind, metavar, help in _EXTRA]
    return _with_options(command, [*extra, *(_build_setting_option(each) for each in SETTINGS.values() if each.flag)])


def with_inference_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a Typer command the options of a pass over a dataset; it gets them as keywords, those not given as None."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, keyword, default=None, annotation=each) for name, each in _INFERENCE.items()]
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
    default = "" if setting.default in (None, False, ()) else f" [default: {_format_default(setting.default)}]"
    return _build_option(setting.key, kind, setting.kind.metavar, setting.help + default, setting.panel)


def _skip_value_parsing(command: Any, ctx: Any) -> Any:
    """Typer 0.29 would load pydantic to parse values: 0.1 s of CPU per call. (Other versions ignore this.)"""
    for option in command.get_params(ctx):
        option._runtime_param = _RawText()
    return ctx


def _write_panels(command: Any, ctx: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str]]] = {}
    for option in command.get_params(ctx):
        if record := option.get_help_record(ctx):
            panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(record)
    for panel, records in panels.items():
        with formatter.section(panel):
            formatter.write_dl(records)


def _format_default(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _build_option(name: str, kind: Any, metavar: str, help: str, panel: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    option = typer.Option(
        flag,
        metavar=metavar or None,
        help=help,
        rich_help_panel=panel,
        show_default=False,
        autocompletion=completion.offer_for(name, metavar),
    )
    default = False if kind is bool else None
    annotation = bool if kind is bool else kind | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )
