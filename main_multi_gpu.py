"""The entry point: options → Config → training or a command; the only place where errors become exit codes.

    torchrun --nproc_per_node=4 main_multi_gpu.py --multi-gpu ddp --epochs 20
    python main_multi_gpu.py --config har
    python main_multi_gpu.py recipes

torch is imported only when training starts, so that --help and usage errors are fast.
"""

import gc
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

if sys.platform == "win32":
    sys.exit("error: this program needs Linux, not Windows itself\n  try: WSL, which is Linux: wsl --install")
try:
    import typer
except ModuleNotFoundError as missing:  # started with another python than the environment's
    way_out = "make quickstart, then: source .venv/bin/activate (or: pip install .)"
    sys.exit(f"error: {sys.executable} has no package {missing.name!r}\n  try: {way_out}")

from multigpu_cli.capabilities import COMMANDS, load
from multigpu_cli.commands.cli import app
from multigpu_cli.commands.options import Command, list_given_flags, with_train_options
from multigpu_cli.distributed.launch_env import (
    AttemptRefused,
    FinalVerdict,
    find_binding_verdict,
    is_told_by_launcher,
    prepare_cublas,
    record_failure,
    record_verdict,
    write_error,
)
from multigpu_cli.distributed.processes import die_with_parent
from multigpu_cli.errors import FAILED, GRACE, STOPPED, WRONG_REQUEST, RequestError, TrainingError, make_printable
from multigpu_cli.faults import explain

_INTERRUPTED = 130
_UsageError: Any = typer.BadParameter.__base__  # the same class in Typer's own click and in the installed one


for _name, _code in COMMANDS.items():
    _command = load(_code)
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name, cls=Command)(_command)


@app.callback(invoke_without_command=True)
@with_train_options
def _front_door(context: typer.Context, **values: Any) -> Callable[[], int] | None:
    """Train a PyTorch model on one or more GPUs. Without a command, this trains."""
    if context.invoked_subcommand is None:
        return partial(_train, values)
    if flags := list_given_flags(values):
        remedy = f"options of a command come after it: {context.invoked_subcommand} {flags[0]} …"
        raise RequestError(f"{flags[0]} stands before the command {context.invoked_subcommand!r}", remedy=remedy)
    return None


@app.command(cls=Command)
@with_train_options
def train(**values: Any) -> int:
    """Train a model: the same as without a command."""
    return _train(values)


def _train(values: Mapping[str, Any]) -> int:
    if values["version"]:
        _print_on_main(_format_version())
        return 0
    from multigpu_cli.commands.requests import build_config

    if values["verbose"] and (values["quiet"] or values["json"]):
        other = "--quiet" if values["quiet"] else "--json"
        raise RequestError(f"--verbose can't be used with {other}", remedy="one of them")
    screen = next((name for name in ("json", "quiet", "verbose") if values[name]), "normal")
    config = build_config(values, os.environ)
    if values["print_config"]:
        from multigpu_cli.config.yaml_text import dump_config

        _print_on_main(dump_config(config).rstrip())
        return 0
    gc.disable()  # torch's objects stay: collecting while it loads costs half a second
    from train_multi_gpu import train  # torch loads here

    summary = train(config, screen=screen, dry_run=values["dry_run"])
    return 0 if values["dry_run"] else {"completed": 0, "failed": FAILED, "stopped": STOPPED}[summary["status"]]


def _print_on_main(text: str) -> None:
    if _read_rank() == 0:
        print(text)


def _format_version() -> str:
    from importlib import metadata

    def of(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    return f"multigpu {of('multigpu-cli')} (torch {of('torch')}, Python {sys.version.split()[0]})"


def run(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    if verdict := find_binding_verdict(os.environ):
        write_error(os.environ, verdict.code, verdict.message)
        return verdict.code
    code, message = _run_command(argv)
    if message and code in (WRONG_REQUEST, STOPPED):
        record_verdict(os.environ, FinalVerdict(code, message))
    return code


def _run_command(argv: Sequence[str]) -> tuple[int, str]:
    """Run the command; returns the exit code and the message."""
    try:
        command: Any = typer.main.get_command(app)
        call = command.main(args=list(argv), prog_name=_program_name(), standalone_mode=False, obj=os.environ)
        code = (call() if callable(call) else call) or 0
    except _UsageError as error:
        return _report_error(WRONG_REQUEST, explain.describe_usage_error(error), error, argv)
    except AttemptRefused as over:  # the first attempt has reported it
        write_error(os.environ, over.exit_code, over.problem)
        return over.exit_code, ""
    except (KeyboardInterrupt, typer.Abort) as error:
        return _report_error(_INTERRUPTED, "interrupted", error, argv)
    except BrokenPipeError:
        return FAILED, "the reader of the output closed it"
    except Exception as error:  # every error ends here, and none as a traceback
        code = error.exit_code if isinstance(error, TrainingError) else FAILED
        return _report_error(code, explain.describe_error(error), error, argv)
    if code == STOPPED:
        write_error(os.environ, STOPPED, "stopped by a signal; run the same command again to resume")
    return code, "stopped by a signal" if code == STOPPED else ""


def _report_error(code: int, message: str, error: BaseException, argv: Sequence[str]) -> tuple[int, str]:
    """Print an error once: rank 0 at once; other ranks, and those that only lost their peers, after a delay."""
    whole = explain.hide_secrets("".join(traceback.format_exception(error)))
    follows = getattr(error, "caused_by_peer", False)
    lost = follows or ("RANK" in os.environ and explain.is_peer_failure(error))
    if code == FAILED and not lost:
        again = record_failure(os.environ, message, getattr(error, "failed_at", None))
        message = "\n".join(filter(None, [message, again]))
    foreseen = isinstance(error, (TrainingError, _UsageError, KeyboardInterrupt, typer.Abort))
    write_error(os.environ, code, message, message if foreseen or lost else whole)
    rank = _read_rank()
    if not message or is_told_by_launcher(error, os.environ) or (rank and code == _INTERRUPTED):
        return code, message
    first = rank == 0 or (follows and os.environ.get("LOCAL_RANK") == "0")  # no other rank of its node reports
    time.sleep(GRACE * ((not first) + (lost and not follows)))
    before_torch = "torch" not in sys.modules  # all ranks of a node fail in the same way
    shared = getattr(error, "shared", False)  # rank 0 reports it for all
    if rank == 0 or (not shared and (not before_torch or os.environ.get("LOCAL_RANK") == "0")):
        columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
        text = make_printable(whole + message if "--debug" in argv else explain.shorten_message(message, columns))
        print(text if rank == 0 else f"rank {rank}: {text}", file=sys.stderr, flush=True)
    return code, message


def _read_rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _program_name() -> str:
    program = Path(sys.argv[0]).name
    module = "-m multigpu_cli" if program == "__main__.py" else program
    return f"python {module}" if program.endswith(".py") else program


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning of Python for the terminal: one that quotes a file may hold control characters.

    It names the line of code that warns, unless that is ours. The arguments are those of `warnings.formatwarning`.
    """
    ours = Path(filename).is_relative_to(Path(__file__).parent / "multigpu_cli")
    where = "" if ours else f" ({category.__name__}, {filename}:{lineno})"
    return make_printable(f"warning: {message}{where}\n")


def leave(code: int) -> NoReturn:
    """Flush and end the process, without torch's exit, where gloo sometimes aborts a finished run."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if "torch" in sys.modules:
        os._exit(code)
    sys.exit(code)


def main() -> NoReturn:
    """The console script `multigpu`.

    Until training handles signals, Ctrl-C ends the process at once: a KeyboardInterrupt during an import may get lost,
    and torchrun would wait half a minute for the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.formatwarning = format_warning
    if "RANK" in os.environ:  # before torch loads, which takes seconds in which the agent may be killed
        die_with_parent()
    prepare_cublas()
    leave(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
