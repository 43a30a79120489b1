"""The help: a screen of what most people need, every option, or one chapter; plain text, in colour on a terminal."""

import inspect
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from multigpu_cli.config.schema import SETTINGS
from multigpu_cli.config.types import Setting
from multigpu_cli.errors import RequestError, did_you_mean

GENERAL = "General"
TOPICS: Mapping[str, tuple[str, str]] = {  # the chapters in their order: word for `help` → title, page under docs/
    "general": (GENERAL, "start/first-run.md"),
    "data": ("Data", "howto/data.md"),
    "model": ("Model and task", "howto/models.md"),
    "chat": ("Chat and language models", "howto/fine-tuning.md"),
    "rl": ("Reinforcement learning (PPO)", "howto/reinforcement-learning.md"),
    "distributed": ("Distributed training", "concepts/strategies.md"),
    "batch": ("Length and batch", "howto/batch-and-rate.md"),
    "optimizer": ("Learning rate and optimizer", "howto/optimizers.md"),
    "precision": ("Precision and reproducibility", "concepts/exactness.md"),
    "checkpoints": ("Saving and resuming", "howto/resume.md"),
    "logging": ("Logging", "howto/logging.md"),
    "faults": ("Faults", "reference/faults.md"),
}
_DOCS = Path(__file__).resolve().parents[2] / "docs"  # of a checkout; an installed wheel has none
_PANELS = [title for title, _ in TOPICS.values()]
COMMON = (  # the options that most commands have, by their names as parameters
    *("config", "data", "data_dir", "model", "multi_gpu", "gpu_ids", "epochs", "batch_size", "global_batch_size", "lr"),
    *("amp", "save_dir", "resume", "exact", "dry_run"),
)
_GROUPS: Mapping[str, Sequence[str]] = {
    "Train": ("train", "tune", "recipes"),
    "Prepare": ("doctor", "selftest", "plan", "bench", "data"),
    "Manage runs": ("status", "watch", "report", "verify", "checkpoints", "clean", "mirror", "log", "profile"),
    "Use a trained model": ("evaluate", "predict", "sample", "export"),
}
_EXAMPLES = (("--data mine:data --model mine:net", "your own"), ("--dry-run", "plan only"))
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_LEFT = 24  # columns, at most, of options beside their texts
_STYLES = (  # patterns and their ANSI styles, which are those of Typer's own help
    (r"^\S.*:$", "1"),  # headings
    (r"^Usage:", "33"),
    (r"(?<![\w-])--?[a-z][\w-]*", "1;36"),  # flags
    (r"(?<=^  )[a-z]+(?=  )", "1;36"),  # commands
    (r"(?<=\x1b\[0m )(?:[A-Z0-9]\S*|[a-z0-9]+\|\S+)(?=  |$)", "1;33"),  # a flag's value
    (r"\[(?:default|required)[^\]]*\]", "2"),
)


class HelpPage:
    """How a command writes its help; a base beside Typer's own class."""

    def collect_usage_pieces(self: Any, ctx: Any) -> list[str]:
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        names = [_name_argument(param) if param.required else f"[{_name_argument(param)}]" for param in arguments]
        return ["[OPTIONS]", *names, *([self.subcommand_metavar] if hasattr(self, "commands") else [])]

    def get_help(self: Any, ctx: Any) -> str:
        return colour(super().get_help(ctx), ctx.obj)  # type: ignore[misc]

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        write_options(self, ctx, formatter)
        if hasattr(self, "commands"):
            write_commands(self, ctx, formatter)


def colour(text: str, environ: Mapping[str, str] | None) -> str:
    """The help in colours; Typer leaves them out where there is no terminal."""
    if environ and (environ.get("NO_COLOR") or environ.get("TERM") == "dumb"):
        return text
    for pattern, style in _STYLES:
        text = re.sub(pattern, f"\x1b[{style}m\\g<0>\x1b[0m", text, flags=re.MULTILINE)
    return text


def build_help_all_option() -> inspect.Parameter:
    """`--help-all`, of every command that takes the options of a training."""

    def show(ctx: typer.Context, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[__name__] = True
            typer.echo(ctx.get_help(), color=ctx.color)
            raise typer.Exit

    text = "show all options and exit"
    option = typer.Option("--help-all", help=text, is_eager=True, callback=show, expose_value=False)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter("help_all", keyword, default=False, annotation=Annotated[bool, option])


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """A command's arguments and options; of those of a training only the common ones, or with --help-all all."""
    panels: dict[str, list[Any]] = {title: [] for title in ("Arguments", "Options", *_PANELS)}
    for param in command.get_params(ctx):
        plain = "Arguments" if param.param_type_name == "argument" else "Options"
        panels[getattr(param, "rich_help_panel", None) or plain].append(param)
    whole, trains = ctx.meta.get(__name__), bool(panels[GENERAL])
    known = {param.name: param for param in chain(*panels.values())}
    if trains and not whole and (ctx.parent is None or ctx.info_name == "train"):
        examples = [(f"{ctx.find_root().command_path} {flags}", text) for flags, text in _EXAMPLES]
        _write_section(formatter, "Examples", examples, 80)
        _write_section(formatter, "Common options", [_describe(known[name], ctx) for name in COMMON])
    elif trains and not whole:
        own = [*panels["Options"], known["json"]]
        _write_section(formatter, "Options", [_describe(param, ctx) for param in own])
        formatter.write_paragraph()
        formatter.write_text("All training options apply as well: see --help-all.")
    else:
        for title, params in panels.items():
            _write_section(formatter, title, [_describe(param, ctx) for param in params])


def write_commands(group: Any, ctx: Any, formatter: Any) -> None:
    """The sub-commands, each with its first sentence; those of the front door in groups, and where to find more."""
    groups = {"Commands": list(group.commands)} if ctx.parent else _GROUPS
    left = max(map(len, group.commands))
    for title, names in groups.items():
        there = [(name.ljust(left), group.commands[name]) for name in names if name in group.commands]
        _write_section(formatter, title, [(name, each.get_short_help_str(formatter.width)) for name, each in there])
    if not ctx.parent:
        formatter.write_paragraph()
        chapters = f"{ctx.command_path} help CHAPTER, with one of {', '.join(TOPICS)}"
        formatter.write_text(f"All options: --help-all. One chapter: {chapters}.")


def format_topic(topic: str | None, root: Any) -> str:
    """A chapter of the training options, with its settings that have no flag; or the help of a command."""
    commands = root.command.commands
    if topic is None:
        return str(root.get_help())
    if topic in commands and topic not in TOPICS:
        return str(type(root)(commands[topic], info_name=topic, parent=root, **CONTEXT).get_help())
    if topic not in TOPICS:
        known = {*TOPICS, *commands}
        raise RequestError(f"help {topic}: no such chapter or command", remedy=did_you_mean(topic, known))
    (title, page), formatter = TOPICS[topic], root.make_formatter()
    flags = [param for param in root.command.params if getattr(param, "rich_help_panel", None) == title]
    _write_section(formatter, title, [_describe(param, root) for param in flags])
    settings = [each for each in SETTINGS.values() if each.panel == title and not each.flag]
    rows = [(f"{each.key} {each.kind.metavar}", describe_setting(each)) for each in settings]
    _write_section(formatter, "In YAML, or with --set KEY=VALUE", rows)
    if (_DOCS / page).is_file():
        formatter.write(f"\nMore: {_DOCS / page}\n")
    return colour(formatter.getvalue().rstrip(), root.obj)


def describe_setting(setting: Setting) -> str:
    """Its help, with the default unless there is none to name."""
    text = f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)
    return setting.help + ("" if setting.default in (None, False, (), {}) else f" [default: {text}]")


def _write_section(formatter: Any, title: str, rows: Sequence[tuple[str, str]], left: int = _LEFT) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, left)


def _name_argument(param: Any) -> str:
    return f"{param.metavar}..." if param.nargs < 0 else str(param.metavar)


def _describe(param: Any, ctx: Any) -> tuple[str, str]:
    is_argument = param.param_type_name == "argument"
    return (_name_argument(param), param.help) if is_argument else param.get_help_record(ctx)
