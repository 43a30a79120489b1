"""Starts one process per GPU with torch's elastic agent, as torchrun does."""

import atexit
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import yaml
from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from multigpu_cli.checkpoint.files import is_locked
from multigpu_cli.checkpoint.run_folder import read_note, read_summary, resolve_folder
from multigpu_cli.config.rules import OWN_RUN_ID
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import explicit_dump
from multigpu_cli.distributed.launch_env import write_error
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.processes import check_spawned_script, die_with_parent, python_command, quote_last_lines
from multigpu_cli.errors import FAILED, GRACE, TrainingError
from multigpu_cli.faults.explain import describe_unexpected_error, hide_secrets, is_peer_failure
from multigpu_cli.monitor.history import JOURNAL, History, load_history
from multigpu_cli.monitor.journal import Journal

_FRONT_DOOR = Path(__file__).resolve().parent.parent / "main_multi_gpu.py"
_SAFE_PATH, _OURS = "PYTHONSAFEPATH", "multigpu"  # a spawned Python takes no multiprocessing.py of the user's folder
Answer = TypeVar("Answer")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class WorkersFailed(TrainingError):
    """A worker ended with a non-zero exit code and told the user why; not so the rank `killed`, perhaps by a signal."""

    def __init__(self, exit_code: int, problem: str = "", killed: int | None = None) -> None:
        again = "the same command resumes from the last checkpoint; dmesg says whether memory ran out"
        super().__init__(problem, remedy="" if killed is None else again)
        self.exit_code = exit_code
        self.killed = killed


def self_launch(config: Config, placement: Placement, screen: str) -> dict[str, Any]:
    """Run the command in as many processes as the placement says, over a free loopback port; returns the summary.

    The folder is chosen here, so that all restarts use the same one. The workers read the explicit settings from a file
    and write the run folder; the agent passes signals on. WorkersFailed: some worker ended with a non-zero exit code.
    """
    config = resolve_folder(config)
    run_folder, began = Path(str(config.checkpoint.save_dir)), time.time()
    try:
        _run_until_done(config, placement, screen, run_folder)
    except WorkersFailed as failed:
        if failed.killed is not None:
            when = _record_kill(run_folder, failed, began)
            failed.problem += when + quote_last_lines(run_folder / "logs", failed.killed)
        raise
    except SignalException as stopped:
        status = (read_summary(run_folder) or {}).get("status")
        if status != "stopped":
            raise WorkersFailed(FAILED if status == "failed" else 128 + stopped.sigval) from stopped
    return read_summary(run_folder) or {}


def _record_kill(run_folder: Path, failed: WorkersFailed, began: float) -> str:
    """Add the cause to the journal, since no rank could know it; return when it was, in words."""
    file = run_folder / JOURNAL
    history = load_history(run_folder) if file.is_file() else History()
    if not history.attempts or history.attempts[-1].start["time"] < began or is_locked(run_folder):
        return ""
    with closing(Journal(file)) as journal:
        cause = {"cause": failed.problem, "rank": failed.killed}
        journal.write("end", status="failed", step=history.step, fingerprint=None, **cause)
    return f" after step {history.step}" if history.step else " before the first step"


def _run_until_done(config: Config, placement: Placement, screen: str, run_folder: Path) -> None:
    """Restart after out-of-memory, beyond --max-restarts: the workers left a note with a smaller micro-batch."""
    while True:
        before = read_note(run_folder)
        try:
            with tempfile.TemporaryDirectory(prefix="multigpu-") as folder:
                request = Path(folder, "request.yaml")
                request.write_text(yaml.safe_dump(explicit_dump(config) | {"from_files": config.from_files}))
                argv = [str(_FRONT_DOOR), "--config", str(request), *([] if screen == "normal" else [f"--{screen}"])]
                launch = _build_launch_config(placement, config.fault.max_restarts, folder)
                _launch(launch, placement, sys.executable, *argv)
                return
        except WorkersFailed:
            if read_note(run_folder) == before:
                raise


def run_cli(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run main_multi_gpu.py with these arguments in a process; returns what it printed, or raises WorkersFailed."""
    command, pipe = python_command(str(_FRONT_DOOR), *argv), subprocess.PIPE
    with subprocess.Popen(command, env=dict(environ), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            printed, complaint = process.communicate()
        except BaseException:
            process.terminate()  # it ends its own workers
            process.wait()
            raise
    if process.returncode:
        problem = complaint.rpartition("error: ")[2].strip() or "main_multi_gpu.py failed"
        raise WorkersFailed(process.returncode, problem)
    return printed


def run_in_workers(
    placement: Placement, function: Callable[..., Answer], *arguments: Any, max_restarts: int = 0
) -> dict[int, Answer]:
    """Call a function of a module in `placement.num_processes_to_launch` processes; returns each rank's result.

    RequestError: they could not import the user's script. WorkersFailed: a call raised, or its process ended; has the
    exit code and message of the error. KeyboardInterrupt: a signal ended them.
    """
    check_spawned_script(function, arguments)
    with tempfile.TemporaryDirectory(prefix="multigpu-") as logs:
        config = _build_launch_config(placement, max_restarts, logs)
        try:
            return _launch(config, placement, _call_in_worker, os.getpid(), function, *arguments)
        except SignalException as stopped:
            raise KeyboardInterrupt from stopped


def _call_in_worker(parent: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in a worker; a rank that only lost its peers lets them report their error first."""
    die_with_parent(parent)  # it may have ended while torch was loaded here
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]  # not for what the function starts
    try:
        result = function(*arguments)
    except Exception as error:  # anything the function raises: recorded for the parent, then raised as an exit code
        if getattr(error, "caused_by_peer", False) or is_peer_failure(error):
            time.sleep(GRACE)
        code, message = FAILED, describe_unexpected_error(error)
        if isinstance(error, TrainingError):
            code, message = error.exit_code, hide_secrets(str(error))
        write_error(os.environ, code, message, hide_secrets(traceback.format_exc()))
        raise SystemExit(code) from error
    if str(getattr(function, "__module__", "")).startswith("multigpu_cli."):
        # not for other functions, whose exit handlers must run
        atexit.register(os._exit, 0)  # skips torch's exit, where gloo sometimes aborts
    return result


def _build_launch_config(placement: Placement, max_restarts: int, logs: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=placement.num_processes_to_launch,
        run_id=OWN_RUN_ID + uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
        signals_to_handle=",".join(each.name for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN),  # nohup
    )


def _launch(
    launch: LaunchConfig, placement: Placement, entry: Callable[..., Any] | str, *arguments: Any
) -> dict[int, Any]:
    quiet = ("torch.distributed.elastic", "torch.multiprocessing.spawn", server.__name__)
    for name in quiet:  # the workers report their own errors
        logging.getLogger(name).setLevel(logging.CRITICAL)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}  # the agent does not restore them
    changed = {"CUDA_VISIBLE_DEVICES": _visible_devices(placement, os.environ.get("CUDA_VISIBLE_DEVICES"))}
    if not isinstance(entry, str) and _SAFE_PATH not in os.environ:
        changed[_SAFE_PATH] = _OURS
    before = {name: os.environ.get(name) for name in changed}
    try:
        os.environ.update(changed)
        return elastic_launch(launch, entry)(*arguments) or {}
    except ChildFailedError as failure:
        raise _worker_error(failure, prints=isinstance(entry, str)) from failure
    finally:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number, handler in handlers.items():
                if handler is not None:  # a handler not set from Python can't be restored
                    signal.signal(number, handler)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _worker_error(failure: ChildFailedError, *, prints: bool) -> WorkersFailed:
    """The exit code of the first worker that failed, and its message if the workers did not print it.

    The agent ends the others with SIGTERM: they come last, whatever their clocks say.
    """
    rank, first = min(
        failure.failures.items(), key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp)
    )
    if first.exitcode >= 0 and (not prints or first.error_file_data.get("message") != "<NONE>"):
        message: Any = first.message  # of a function that raised: a dict with its traceback
        text = message.get("message", "") if isinstance(message, dict) else message
        return WorkersFailed(first.exitcode, "" if prints else f"rank {rank}: {text}")
    if first.exitcode >= 0:
        return WorkersFailed(first.exitcode, f"rank {rank} ended without an error message", killed=rank)
    name = signal.Signals(-first.exitcode).name
    return WorkersFailed(FAILED, f"rank {rank} was killed ({name})", killed=rank)


def _visible_devices(placement: Placement, before: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for the workers: the chosen ones of those that this process sees; "" on CPU."""
    if placement.devices[0].type == "cpu":
        return ""
    names: list[Any] = before.split(",") if before else list(range(1024))
    return ",".join(str(names[device.index or 0]) for device in placement.devices)
