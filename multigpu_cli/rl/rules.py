"""The rules between --task ppo, environments, and the settings that only they read."""

from collections.abc import Iterator

from multigpu_cli.config.code_names import names_environments
from multigpu_cli.config.rules import Rule
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError


def _reinforcement(config: Config) -> Iterator[RequestError]:
    task = config.task
    acts = names_environments(config)
    if acts and task.name not in (None, "ppo") and ":" not in task.name:
        yield RequestError(
            f"--task {task.name} can't be used with --data {config.data.name}: this names environments, not a dataset",
            remedy="use --task ppo, or leave out --task",
        )
    if acts or task.name == "ppo" or (task.name is not None and ":" in task.name):
        return
    for key in ("num_envs", "env_group", "env_steps", "episodes"):
        if config.get(key) is not None:
            flag = "--" + key.replace("_", "-")
            yield RequestError(
                f"{flag} is for reinforcement learning only", remedy=f"use --task ppo, or leave out {flag}"
            )


RULES = (Rule("data task num_envs env_group env_steps episodes", _reinforcement),)
