"""Files that outlive an attempt: torchrun's error files, and the records of earlier attempts.

With several nodes each agent counts its own restarts and has its own folder; `agree_on_roster` merges them.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.errors import FAILED, TrainingError


class FinalVerdict(NamedTuple):
    """The end of an attempt that must not be repeated.

    Attributes:
        nodes: the agents of that attempt; empty before rendezvous. It does not bind other nodes.
    """

    code: int
    message: str
    nodes: Sequence[str] = ()

    @classmethod
    def of(cls, code: int, message: str, nodes: Iterable[str]) -> "FinalVerdict":
        """From the values that JSON has of one."""
        return cls(code, message, tuple(nodes))

    def applies_to(self, nodes: Iterable[str]) -> bool:
        """Whether it binds these nodes: after a node has joined or left, another attempt may succeed."""
        return not self.nodes or set(self.nodes) == set(nodes)


class AttemptRefused(TrainingError):
    """An earlier attempt, perhaps on another node, ended with a final verdict, so this attempt must not run."""

    shared = True

    def __init__(self, verdict: FinalVerdict) -> None:
        super().__init__(verdict.message)
        self.exit_code = verdict.code


class PreviousAttempt(NamedTuple):
    """How the attempt before this one ended.

    Attributes:
        step: optimizer steps done, None before the first.
        last_progress_time: Unix time of its last progress.
    """

    cause: str
    step: int | None
    last_progress_time: float


class AttemptRecord(NamedTuple):
    """An attempt that all ranks have agreed on, as one rank has recorded it.

    Attributes:
        nodes: the agents that took part.
        process: pid of the worker that recorded it.
    """

    attempt: int
    nodes: Sequence[str]
    process: int


def write_error(environ: Mapping[str, str], code: int, message: str, callstack: str = "") -> None:
    """Write the message to torchrun's error file, in the format of torch's ErrorHandler, for torchrun's summary."""
    if not (file := environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    extra = {"py_callstack": callstack or message, "timestamp": str(int(time.time()))}
    draft = Path(f"{file}.draft")
    with suppress(OSError):  # the message has been printed already
        draft.write_text(json.dumps({"message": {"message": message, "errorCode": code, "extraInfo": extra}}))
        draft.replace(file)  # the agent may read it at any time


def read_exit_codes(logs: Path) -> set[int | None]:
    """The exit codes in the error files of an agent's last attempt; None for a file that we did not write.

    Args:
        logs: the agent's --log-dir.
    """
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda folder: int(folder.name.removeprefix("attempt_")))
    files = attempts[-1].glob("*/error.json") if attempts else []
    return {json.loads(file.read_text())["message"].get("errorCode") for file in files}


def has_redirected_logs(environ: Mapping[str, str]) -> bool:
    """Whether torchrun writes log files (--redirects, --tee), which are in the folder of the error files."""
    file = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return any(file.with_name(name).exists() for name in ("stdout.log", "stderr.log")) if file.name else False


def record_verdict(environ: Mapping[str, str], verdict: FinalVerdict) -> None:
    """Record for further attempts of this agent that they must not repeat this one.

    The agent restarts its workers after any exit code other than 0, also after a wrong request or a stop.
    """
    if int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        now = _read_attempt_record(environ)
        nodes = now.nodes if now and now.process == os.getpid() else ()
        _write(find_agent_dir(environ), f"verdict-{attempt_number(environ)}", verdict._replace(nodes=nodes)._asdict())


def find_binding_verdict(environ: Mapping[str, str]) -> FinalVerdict | None:
    """The final verdict of an earlier attempt under this agent, if it applies and this is the only agent."""
    found = read_last_verdict(environ)
    alone = environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE")
    here = [node_name(environ)] if alone else []
    return found if found and found.applies_to(here) else None


def read_last_verdict(environ: Mapping[str, str]) -> FinalVerdict | None:
    """The last verdict under this agent since its last rendezvous, whether it applies or not.

    Earlier verdicts did not apply at that rendezvous, and a node that joins and leaves again does not revive them.
    """
    folder, before = find_agent_dir(environ), _read_attempt_record(environ)
    for number in reversed(range(before.attempt if before else 0, attempt_number(environ))):
        if found := _read_json(folder, f"verdict-{number}"):
            return FinalVerdict.of(**found)
    return None


def record_failure(environ: Mapping[str, str], message: str, step: int | None) -> str:
    """Record a failure; one before the first step, or the same one at the same step twice, must not be repeated.

    Args:
        step: optimizer steps done, None before the first of this attempt.

    Returns:
        A line that says so if restarts are left that will not be made, else "".
    """
    folder, number = find_agent_dir(environ), attempt_number(environ)
    failure = {"message": message, "step": step}
    before = any(_read_json(folder, f"failure-{earlier}") == failure for earlier in range(number))
    if step is not None and not before:
        _write(folder, f"failure-{number}", failure)
        return ""
    record_verdict(environ, FinalVerdict(FAILED, message))
    if int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) >= int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return ""
    why = "a failure before the first step" if step is None else f"the same failure at step {step} again"
    return f"  no restart: {why} would be repeated"


def attempt_number(environ: Mapping[str, str]) -> int:
    """The number of this attempt: the agreed one, else the last recorded one plus 1, else the agent's own count."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return 0
    count = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    before = _read_attempt_record(environ)
    return count if before is None else max(count, before.attempt + (before.process != os.getpid()))


def record_attempt(environ: Mapping[str, str], number: int, nodes: Sequence[str]) -> None:
    """Record the attempt that all ranks have agreed on."""
    folder = find_agent_dir(environ)
    if folder is not None:
        now = AttemptRecord(number, list(nodes), os.getpid())
        with suppress(OSError):  # a full disk: the agents' own counts are used instead
            _replace(folder / f"multigpu-round-{environ.get('LOCAL_RANK', '0')}.json", now._asdict())


def record_end(folder: Path | None, number: int, last: PreviousAttempt) -> None:
    """Record for the next attempt how this one ended."""
    with suppress(OSError):
        _write(folder, f"last-{number}", last._asdict())


def read_previous_attempt(environ: Mapping[str, str]) -> PreviousAttempt | None:
    """The record of the previous attempt, if any."""
    found = _read_json(find_agent_dir(environ), f"last-{attempt_number(environ) - 1}")
    return PreviousAttempt(**found) if found else None


def record_run(folder: Path | None, number: int, run: str) -> None:
    """Record for later attempts the run folder of attempt `number`; called by one process of each node."""
    if folder is None or run in (known := list_recorded_runs(folder, [number])):
        return
    with suppress(OSError):  # a full disk: a restart then chooses a folder as a first attempt does
        _replace(folder / f"multigpu-runs-{number}.json", {"runs": [*known, run]})


def list_recorded_runs(folder: Path | None, attempts: Iterable[int]) -> list[str]:
    """The run folders of these attempts, in the order in which they were started or resumed."""
    recorded = [(_read_json(folder, f"runs-{number}") or {"runs": []})["runs"] for number in attempts]
    return list(dict.fromkeys(run for runs in recorded for run in runs))


def node_name(environ: Mapping[str, str]) -> str:
    """A unique name of the agent that started this process: its host, pid and folder."""
    return f"{os.uname().nodename} {os.getppid()} {(find_agent_dir(environ) or Path()).name}"


def find_agent_dir(environ: Mapping[str, str]) -> Path | None:
    """The agent's own folder, shared by all its attempts: RUN in RUN/attempt_0/RANK/error.json."""
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parents[2] if file else None


def _read_attempt_record(environ: Mapping[str, str]) -> AttemptRecord | None:
    found = _read_json(find_agent_dir(environ), f"round-{environ.get('LOCAL_RANK', '0')}")
    return AttemptRecord(**found) if found else None


def _write(folder: Path | None, name: str, content: Mapping[str, Any]) -> None:
    """Write a record unless it exists: every rank may write it, and the first one counts."""
    if folder is None:
        return
    with suppress(FileExistsError), open(folder / f"multigpu-{name}.json", "x") as file:
        json.dump(content, file)


def _replace(file: Path, content: Mapping[str, Any]) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    draft.replace(file)


def _read_json(folder: Path | None, name: str) -> dict[str, Any] | None:
    if folder is None:
        return None
    try:
        return dict(json.loads((folder / f"multigpu-{name}.json").read_text()))
    except (FileNotFoundError, ValueError):  # another rank of this node may be writing it
        return None
