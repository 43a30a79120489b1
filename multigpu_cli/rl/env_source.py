"""Environments as a data source: what --data names, and the arithmetic of rollouts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from multigpu_cli.config.schema import Config
from multigpu_cli.data.source import DataSource
from multigpu_cli.environments.base import Box, Discrete, EnvironmentGroup, find_group_factory
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import make_key
from multigpu_cli.rl.objective import PPOSettings
from multigpu_cli.rl.policy import build_policy
from multigpu_cli.runtime import factories

_SPLITS = {"train": 0, "val": 1, "test": 2}
_ENVIRONMENTS = 16  # in total, where --num-envs does not say


@dataclass(frozen=True, kw_only=True)
class EnvSource(DataSource):
    """A source whose samples are decisions in environments.

    An epoch is one update: every environment takes `settings.rollout` steps, and the optimizer passes over their
    decisions `settings.passes` times. A micro-batch holds decisions of one group of environments.
    """

    make: Callable[[str, range, torch.device], EnvironmentGroup]  # split, numbers of the environments, device → a group
    action: Discrete | Box
    settings: PPOSettings
    environments: int  # over all workers
    group: int  # environments that step together

    @property
    def groups(self) -> int:
        return self.environments // self.group

    @property
    def steps(self) -> int:
        """Environment steps in one update, over all workers."""
        return self.environments * self.settings.rollout

    @property
    def decisions_per_step(self) -> int:
        """Decisions that one optimizer step learns from: the global batch."""
        return self.fixed_batch_sizes[1]  # type: ignore[index]

    @property
    def minibatches(self) -> int:
        """Optimizer steps of one pass over a rollout."""
        return self.group * self.settings.rollout // self.fixed_batch_sizes[0]  # type: ignore[index]


def open_environments(config: Config) -> EnvSource:
    """Probe the environments that --data names, and compute the sizes of rollouts and batches."""
    settings: PPOSettings = factories.call_factory(PPOSettings, {}, config.task.args, where="task")
    make = partial(_group, config, *find_group_factory(config.data.name))
    probe = make("train", range(1), torch.device("cpu"))
    environments, group, micro_batch = _sizes(config, settings)
    rollout = group * settings.rollout
    iterations = config.length.epochs
    if config.task.env_steps:
        enough = -(-config.task.env_steps // (environments * settings.rollout))
        iterations = min(enough, iterations) if "epochs" in config.explicit else enough
    episodes: Any = range(settings.evaluate_episodes)
    more = f"; {probe.remark}" if probe.remark else ""
    return EnvSource(
        train=range(environments * settings.rollout * settings.passes),  # type: ignore[arg-type]
        val=episodes,
        test=episodes,
        input_shape=probe.observation_shape,
        num_classes=build_policy(probe.action).outputs,
        model_kwargs={"action": probe.action},
        note=f"{environments} environments in groups of {group}, {settings.rollout} steps a rollout{more}: ",
        fixed_batch_sizes=(micro_batch, environments * settings.rollout // (rollout // micro_batch)),
        epochs=iterations,
        model="actor-critic",
        task="ppo",
        make=make,
        action=probe.action,
        settings=settings,
        environments=environments,
        group=group,
    )


def _group(
    config: Config,
    factory: Callable[..., Any],
    named_args: Mapping[str, Any],
    split: str,
    numbers: range,
    device: torch.device,
) -> EnvironmentGroup:
    seed = make_key(config.reproducibility.seed, _SPLITS[split])
    offered = {"split": split, "data_dir": config.data.dir, "numbers": tuple(numbers), "seed": seed, "device": device}
    group = factories.call_factory(factory, offered, {**named_args, **config.data.args}, where="data")
    if not isinstance(group, EnvironmentGroup):
        raise RequestError(
            f"--data {config.data.name}: the factory returned a {type(group).__name__}, not an EnvironmentGroup",
            remedy="--task ppo needs environments (multigpu_cli.environments.base), a dataset another --task",
        )
    return group


def _sizes(config: Config, settings: PPOSettings) -> tuple[int, int, int]:
    """Environments, how many step together, and decisions in a micro-batch, which have to divide each other."""
    environments = config.task.num_envs or _ENVIRONMENTS
    group = config.task.env_group or next(size for size in (8, 4, 2, 1) if environments % size == 0)
    if environments % group:
        problem = f"--num-envs {environments} is not a multiple of --env-group {group}"
        raise RequestError(problem, remedy=f"--num-envs {-(-environments // group) * group}, or another --env-group")
    if config.batch.size == "auto":
        raise RequestError("--batch-size auto does not work with --task ppo", remedy="a number")
    for name in ("global_batch_size", "grad_accum_steps", "drop_last"):
        if name in config.explicit and config.get(name):
            raise RequestError(
                f"--{name.replace('_', '-')}: with --task ppo a step is one micro-batch of each group of environments",
                remedy="--num-envs, --env-group and --batch-size",
            )
    rollout = group * settings.rollout
    explicit = "batch_size" in config.explicit
    size = int(config.batch.size) if explicit else rollout // settings.minibatches
    setting = f"--batch-size {size}" if explicit else f"task.args.minibatches {settings.minibatches}"
    if not size or rollout % size:
        raise RequestError(
            f"{setting} does not divide the {rollout} decisions of a group "
            f"(--env-group {group} × task.args.rollout {settings.rollout})",
            remedy="numbers that divide each other, such as powers of two",
        )
    if explicit and "minibatches" in config.task.args and rollout // size != settings.minibatches:
        raise RequestError(
            f"{setting} disagrees with task.args.minibatches {settings.minibatches}: a group makes {rollout} decisions",
            remedy="leave one of them out",
        )
    return environments, group, size
