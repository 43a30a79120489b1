"""`LaunchEnv`: the environment variables that a launcher such as torchrun sets for each worker process."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from multigpu_cli.config.rules import find_environment_errors, is_launched, is_self_launched
from multigpu_cli.errors import RequestError


@dataclass(frozen=True)
class LaunchEnv:
    """The variables that torchrun (or a compatible launcher) sets for each process.

    Attributes:
        attempt: how often the agent has restarted the workers; each node counts its own restarts.
        agent_store: the agent hosts the store, so that rank 0 does not.
        restarts_left: how often the agent would still restart the workers.
        launcher: "torchrun started" or "self-launched", which the plan shows.
        environ: all variables, for the records of earlier attempts.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    attempt: int
    agent_store: bool
    restarts_left: int = 0
    launcher: str = "torchrun started"
    environ: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def current(cls) -> "LaunchEnv | None":
        """The launch environment of this process; None without a launcher."""
        return cls.from_environment(os.environ)

    @classmethod
    def for_existing_group(cls, rank: int, size: int, local_rank: int | None) -> "LaunchEnv":
        """Rank `rank` of processes that were started by other means, with MASTER_ADDR and MASTER_PORT set.

        Raises:
            RequestError: MASTER_ADDR or MASTER_PORT is missing or invalid.
        """
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
        """Read the variables; None if no launcher started this process.

        Raises:
            RequestError: some variables are missing, or are not numbers.
        """
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


def refuse_srun_copies(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse what several tasks of one srun would each do alone, from the first step to the last.

    SLURM_NTASKS does not tell: it stands in every batch script too, and around an agent that srun starts on each node.

    Raises:
        RequestError: srun started several tasks, and no launcher made ranks of them.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if not is_launched(environ) and tasks.isdecimal() and int(tasks) > 1:
        raise RequestError(
            f"srun started {tasks} tasks of this command (SLURM_STEP_NUM_TASKS), and each would do all of it alone",
            remedy="sbatch deploy/slurm.sbatch …, or srun --ntasks-per-node=1 torchrun …, which make ranks of them; or "
            "env -u SLURM_STEP_NUM_TASKS … where each is a run of its own",
        )


def list_secrets() -> tuple[str, ...]:
    """The values of environment variables that hold keys and passwords, by their names, to keep them out of texts."""
    named = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
    return tuple(value for name, value in os.environ.items() if named.search(name.upper()) and len(value) >= 6)
