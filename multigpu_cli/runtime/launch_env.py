"""What a launcher such as torchrun tells each worker process by environment variables: read once, then a value."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from multigpu_cli.config.launcher_rules import find_environment_errors, is_launched, is_self_launched
from multigpu_cli.errors import RequestError


@dataclass(frozen=True)
class LaunchEnv:
    """The variables that torchrun (or a compatible launcher) sets for each process.

    Attributes:
        attempt: how often the agent restarted the workers; with several nodes each has a count of its own.
        agent_store: the agent hosts the store, so that no rank has to.
        restarts_left: how often the agent would start the workers again if this attempt failed.
        launcher: who started the processes, for the plan.
        environ: the launcher's own variables, for what it remembers of earlier attempts.
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
        """Rank `rank` of processes that somebody else started, at MASTER_ADDR and MASTER_PORT.

        Raises:
            RequestError: the environment does not say where they meet.
        """
        if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT", "").isdecimal():
            raise RequestError(
                f"rank={rank} of world_size={size}: nothing says where the other processes are",
                remedy="torchrun --nproc_per_node=N SCRIPT; or leave rank out, and they are started here; or set "
                "MASTER_ADDR and MASTER_PORT in each process",
            )
        local = rank if local_rank is None else local_rank
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return cls(rank, size, local, size, address, port, attempt=0, agent_store=False)

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "LaunchEnv | None":
        """None where no launcher started us.

        Raises:
            RequestError: the variables are there only in part, or are no numbers.
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
