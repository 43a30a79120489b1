"""Files that outlive an attempt: torchrun's error files, and the records of earlier attempts.

With several nodes each agent counts its own restarts and keeps a folder of its own; `rank_handshake` merges them.
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
    """How an attempt ended that must not be repeated.

    Attributes:
        nodes: who came to it; empty where nobody had met yet. Other nodes may do better.
    """

    code: int
    message: str
    nodes: Sequence[str] = ()

    @classmethod
    def of(cls, code: int, message: str, nodes: Iterable[str]) -> "FinalVerdict":
        """From what JSON leaves of one."""
        return cls(code, message, tuple(nodes))

    def applies_to(self, nodes: Iterable[str]) -> bool:
        """Whether it binds these nodes: after a node has come or gone, another attempt is worth it."""
        return not self.nodes or set(self.nodes) == set(nodes)


class AttemptRefused(TrainingError):
    """An earlier attempt, perhaps on another node, has ended for good: there is nothing to do in this one."""

    shared = True

    def __init__(self, verdict: FinalVerdict) -> None:
        super().__init__(verdict.message)
        self.exit_code = verdict.code


class PreviousAttempt(NamedTuple):
    """How the attempt before this one ended.

    Attributes:
        step: optimizer steps done, None before the first.
        last_progress_time: when it last made progress, in Unix seconds.
    """

    cause: str
    step: int | None
    last_progress_time: float


class AttemptRecord(NamedTuple):
    """An attempt that all ranks have agreed on, as one rank remembers it.

    Attributes:
        nodes: the agents that took part.
        process: the worker that remembers.
    """

    attempt: int
    nodes: Sequence[str]
    process: int


def write_error(environ: Mapping[str, str], code: int, message: str, callstack: str = "") -> None:
    """Leave our message where torchrun's final box looks for it (FIELD: its format is that of torch's ErrorHandler)."""
    if not (file := environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    extra = {"py_callstack": callstack or message, "timestamp": str(int(time.time()))}
    draft = Path(f"{file}.draft")
    with suppress(OSError):  # the message was printed already; the box is a courtesy
        draft.write_text(json.dumps({"message": {"message": message, "errorCode": code, "extraInfo": extra}}))
        draft.replace(file)  # the agent may read it at any moment


def read_exit_codes(logs: Path) -> set[int | None]:
    """The exit codes that workers of an agent's last attempt left in their error files; None for files of others.

    Args:
        logs: the agent's --log-dir.
    """
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda folder: int(folder.name.removeprefix("attempt_")))
    files = attempts[-1].glob("*/error.json") if attempts else []
    return {json.loads(file.read_text())["message"].get("errorCode") for file in files}


def has_redirected_logs(environ: Mapping[str, str]) -> bool:
    """Whether torchrun was asked for log files of its own (--redirects, --tee): they lie beside the error files."""
    file = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return any(file.with_name(name).exists() for name in ("stdout.log", "stderr.log")) if file.name else False


def record_verdict(environ: Mapping[str, str], verdict: FinalVerdict) -> None:
    """Let the attempts that this agent may still start know that there is nothing to repeat.

    The agent restarts its workers after any exit code but 0, also after a wrong request or a stop.
    """
    if int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        now = _read_attempt_record(environ)
        nodes = now.nodes if now and now.process == os.getpid() else ()
        _write(find_agent_dir(environ), f"verdict-{attempt_number(environ)}", verdict._replace(nodes=nodes)._asdict())


def find_binding_verdict(environ: Mapping[str, str]) -> FinalVerdict | None:
    """How an earlier attempt under the same agent ended, if that was for good and this agent is alone."""
    found = read_last_verdict(environ)
    alone = environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE")
    here = [node_name(environ)] if alone else []
    return found if found and found.applies_to(here) else None


def read_last_verdict(environ: Mapping[str, str]) -> FinalVerdict | None:
    """The last one that was left here since nodes met for work, whether it holds or not.

    Those from before did not hold then: a node that came and went again does not bring them back.
    """
    folder, before = find_agent_dir(environ), _read_attempt_record(environ)
    for number in reversed(range(before.attempt if before else 0, attempt_number(environ))):
        if found := _read_json(folder, f"verdict-{number}"):
            return FinalVerdict.of(**found)
    return None


def record_failure(environ: Mapping[str, str], message: str, step: int | None) -> str:
    """Remember a failure: one before the first step, or the same at the same step twice, is not worth another attempt.

    Args:
        step: optimizer steps done, None before the first of this attempt.

    Returns:
        A line that says so where attempts are left that won't be made, else "".
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
    return f"  no restart: {why} would only repeat itself"


def attempt_number(environ: Mapping[str, str]) -> int:
    """The number of this attempt: as agreed, else one more than the last that was, else the agent's own count."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return 0
    count = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    before = _read_attempt_record(environ)
    return count if before is None else max(count, before.attempt + (before.process != os.getpid()))


def record_attempt(environ: Mapping[str, str], number: int, nodes: Sequence[str]) -> None:
    """Remember the attempt that all ranks have agreed on."""
    folder = find_agent_dir(environ)
    if folder is not None:
        now = AttemptRecord(number, list(nodes), os.getpid())
        with suppress(OSError):  # a full disk: then the agents' own counts must do
            _replace(folder / f"multigpu-round-{environ.get('LOCAL_RANK', '0')}.json", now._asdict())


def record_end(folder: Path | None, number: int, last: PreviousAttempt) -> None:
    """Leave word for the next attempt of how this one ended."""
    with suppress(OSError):
        _write(folder, f"last-{number}", last._asdict())


def read_previous_attempt(environ: Mapping[str, str]) -> PreviousAttempt | None:
    """What was left by the attempt before this one."""
    found = _read_json(find_agent_dir(environ), f"last-{attempt_number(environ) - 1}")
    return PreviousAttempt(**found) if found else None


def record_run(folder: Path | None, number: int, run: str) -> None:
    """Let later attempts know of a run folder that attempt `number` works in; one process of each node says so."""
    if folder is None or run in (known := list_recorded_runs(folder, [number])):
        return
    with suppress(OSError):  # a full disk: then a restart chooses as a first attempt does
        _replace(folder / f"multigpu-runs-{number}.json", {"runs": [*known, run]})


def list_recorded_runs(folder: Path | None, attempts: Iterable[int]) -> list[str]:
    """The run folders of these attempts, in the order in which they were begun or continued."""
    told = [(_read_json(folder, f"runs-{number}") or {"runs": []})["runs"] for number in attempts]
    return list(dict.fromkeys(run for runs in told for run in runs))


def node_name(environ: Mapping[str, str]) -> str:
    """The agent that started us, as no other is called: its host, its process and its folder."""
    return f"{os.uname().nodename} {os.getppid()} {(find_agent_dir(environ) or Path()).name}"


def find_agent_dir(environ: Mapping[str, str]) -> Path | None:
    """The agent's own folder, which all its attempts share: RUN/attempt_0/RANK/error.json lies in it."""
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parents[2] if file else None


def _read_attempt_record(environ: Mapping[str, str]) -> AttemptRecord | None:
    found = _read_json(find_agent_dir(environ), f"round-{environ.get('LOCAL_RANK', '0')}")
    return AttemptRecord(**found) if found else None


def _write(folder: Path | None, name: str, content: Mapping[str, Any]) -> None:
    """The first word counts; every rank may say it."""
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
