"""What a launcher such as torchrun gives a worker: variables (`LaunchEnv`), and a folder that outlives an attempt.

The folder has torchrun's error files, and the records of earlier attempts. With several nodes each agent counts its own
restarts and has its own folder; `agree_on_roster` merges them.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.config.regular_files import open_new, read_small
from multigpu_cli.config.rules import find_environment_errors, is_launched, is_self_launched
from multigpu_cli.errors import FAILED, RequestError, TrainingError


@dataclass(frozen=True)
class LaunchEnv:
    """The variables that torchrun (or a compatible launcher) sets for each process; `environ` has all there are."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    attempt: int  # how often the agent has restarted the workers; each node counts its own restarts
    agent_store: bool  # the agent hosts the store, so that rank 0 does not
    restarts_left: int = 0  # how often the agent would still restart the workers
    arrival: float = 120.0  # seconds for all ranks to load torch and arrive
    launcher: str = "torchrun started"  # "torchrun started" or "self-launched", which the plan shows
    environ: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def current(cls) -> "LaunchEnv | None":
        """The launch environment of this process; None without a launcher."""
        return cls.from_environment(os.environ)

    @classmethod
    def for_existing_group(cls, rank: int, size: int, local_rank: int | None) -> "LaunchEnv":
        """Rank `rank` of processes that were started by other means, where MASTER_ADDR and MASTER_PORT are."""
        if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT", "").isdecimal():
            raise RequestError(
                f"rank={rank} of world_size={size}: the address of the other processes is unknown",
                remedy="use torchrun --nproc_per_node=N SCRIPT; or leave rank out, and the processes are started here; "
                "or set MASTER_ADDR and MASTER_PORT in each process",
            )
        local = rank if local_rank is None else local_rank
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return cls(rank, size, local, size, address, port, attempt=0, agent_store=False)

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "LaunchEnv | None":
        """Read the variables, or raise a RequestError; None if no launcher started this process."""
        if not is_launched(env):
            return None
        if error := next(find_environment_errors(env), None):
            raise error
        attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", 0))
        return cls(
            rank=int(env["RANK"]),
            size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
            address=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
            attempt=attempt,
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts_left=int(env.get("TORCHELASTIC_MAX_RESTARTS", 0)) - attempt,
            launcher="self-launched" if is_self_launched(env) else "torchrun started",
            environ=dict(env),
        )


def prepare_cublas(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give cuBLAS the workspace of deterministic products: torch reads it once, at the first product of a process."""
    environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def prepare_allocator(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's segments of GPU memory grow, which batches of unlike lengths would fragment, unless the user chose.

    It reads them at its first allocation. Before 2.9 it knows only the second; later versions warn if only that is set.
    """
    if not {*_ALLOCATOR, "PYTORCH_HIP_ALLOC_CONF"} & environ.keys():
        environ.update(dict.fromkeys(_ALLOCATOR, "expandable_segments:True"))


def prepare_inductor(*, deterministic: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what `torch.use_deterministic_algorithms` sets in inductor, as the variable that inductor's import reads."""
    environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(deterministic))


_LEFT_TO_WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")


@contextmanager
def leave_failures_to_watchdog(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Keep torch from ending this process at an error of NCCL or CUDA, before our watchdog or report names the cause.

    Variables that the user has set stay. torch reads them whenever it makes a group.
    """
    names = [name for name in _LEFT_TO_WATCHDOG if name not in environ]
    environ.update(dict.fromkeys(names, "0"))
    try:
        yield
    finally:
        for name in names:
            del environ[name]


def refuse_srun_copies(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse what several tasks of one srun, of which no launcher made ranks, would each do alone from start to end.

    SLURM_NTASKS does not tell: it stands in every batch script too, and around an agent that srun starts on each node.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if not is_launched(environ) and tasks.isdecimal() and int(tasks) > 1:
        raise RequestError(
            f"srun started {tasks} tasks of this command (SLURM_STEP_NUM_TASKS), and each would run all of it alone",
            remedy="sbatch deploy/slurm.sbatch …, or srun --ntasks-per-node=1 torchrun …, which make ranks of them; or "
            "env -u SLURM_STEP_NUM_TASKS … where each is a run of its own",
        )


def list_secrets() -> tuple[str, ...]:
    """The values of environment variables that hold keys and passwords, by their names, to keep them out of texts."""
    named = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
    return tuple(value for name, value in os.environ.items() if named.search(name.upper()) and len(value) >= 6)


def with_variables(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process and these variables, for a process that it starts."""
    return {**os.environ, **more}


class FinalVerdict(NamedTuple):
    """The end of an attempt that must not be repeated."""

    code: int
    message: str
    nodes: Sequence[str] = ()  # the agents of that attempt; empty before rendezvous. It does not bind other nodes

    @classmethod
    def of(cls, code: int, message: str, nodes: Iterable[str]) -> "FinalVerdict":
        """From the values that JSON has of one."""
        return cls(code, message, tuple(nodes))

    def applies_to(self, nodes: Iterable[str]) -> bool:
        """Whether it binds these nodes: after a node has joined or left, another attempt may succeed."""
        return not self.nodes or set(self.nodes) == set(nodes)


class AttemptRefused(TrainingError):
    """An earlier attempt, perhaps on another node, ended with a final verdict, so this attempt must not run."""

    def __init__(self, verdict: FinalVerdict) -> None:
        super().__init__(verdict.message, shared=True)
        self.exit_code = verdict.code


class PreviousAttempt(NamedTuple):
    """How the attempt before this one ended."""

    cause: str
    step: int | None  # optimizer steps done, None before the first
    last_progress_time: float  # Unix time of its last progress


class AttemptRecord(NamedTuple):
    """An attempt that all ranks have agreed on, as one rank has recorded it."""

    attempt: int
    nodes: Sequence[str]  # the agents that took part
    process: int  # pid of the worker that recorded it


def write_error(environ: Mapping[str, str], code: int, message: str, callstack: str = "") -> None:
    """Write the message to torchrun's error file, in the format of torch's ErrorHandler, for torchrun's summary."""
    if not (file := environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    extra = {"py_callstack": callstack or message, "timestamp": str(int(time.time()))}
    _replace(Path(file), {"message": {"message": message, "errorCode": code, "extraInfo": extra}})


def read_exit_codes(logs: Path) -> set[int | None]:
    """The exit codes in the error files of an agent's last attempt, in its --log-dir; None for a file not of ours."""
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda folder: int(folder.name.removeprefix("attempt_")))
    files = attempts[-1].glob("*/error.json") if attempts else []
    return {json.loads(read_small(file))["message"].get("errorCode") for file in files}


def has_redirected_logs(environ: Mapping[str, str]) -> bool:
    """Whether torchrun writes log files (--redirects, --tee), which are in the folder of the error files."""
    file = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return any(file.with_name(name).exists() for name in ("stdout.log", "stderr.log")) if file.name else False


def _has_restarts_left(environ: Mapping[str, str]) -> bool:
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def is_told_by_launcher(error: BaseException, environ: Mapping[str, str]) -> bool:
    """Return whether our launcher prints this error's cause: a rank ended without an error, and no restart is left."""
    is_unexplained = isinstance(error, TrainingError) and error.is_unexplained
    return is_unexplained and is_self_launched(environ) and not _has_restarts_left(environ)


def record_verdict(environ: Mapping[str, str], verdict: FinalVerdict) -> None:
    """Record for further attempts of this agent that they must not repeat this one.

    The agent restarts its workers after any exit code other than 0, also after a wrong request or a stop.
    """
    if _has_restarts_left(environ):
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

    `step` is None before the first of this attempt. Returns a line that says so if restarts are left, else "".
    """
    folder, number = find_agent_dir(environ), attempt_number(environ)
    failure = {"message": message, "step": step}
    before = any(_read_json(folder, f"failure-{earlier}") == failure for earlier in range(number))
    if step is not None and not before:
        _write(folder, f"failure-{number}", failure)
        return ""
    record_verdict(environ, FinalVerdict(FAILED, message))
    if not _has_restarts_left(environ):
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
    if (folder := find_agent_dir(environ)) is not None:  # else the agents' own counts are used
        now = AttemptRecord(number, list(nodes), os.getpid())
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
    if folder is not None and run not in (known := list_recorded_runs(folder, [number])):
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
    """Write a file that others may read at any time, if the disk has room: a restart can do without these."""
    draft = file.with_suffix(f".{os.getpid()}.draft")
    with suppress(OSError):
        draft.unlink(missing_ok=True)  # left by another attempt, or a link that somebody has planted
        with open_new(draft) as opened:
            opened.write(json.dumps(content).encode())
        draft.replace(file)


def _read_json(folder: Path | None, name: str) -> dict[str, Any] | None:
    if folder is None:
        return None
    try:
        return dict(json.loads(read_small(folder / f"multigpu-{name}.json")))
    except (FileNotFoundError, ValueError):  # another rank of this node may be writing it
        return None
