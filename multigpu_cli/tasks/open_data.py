"""Opens the data of a request: a dataset, or environments."""

from collections.abc import Callable
from typing import Any

from multigpu_cli.config.schema import Config
from multigpu_cli.data.collate import SampleForm
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.infer_shape import Moved
from multigpu_cli.data.load_data_source import load_data_source
from multigpu_cli.data.registry import DATASETS
from multigpu_cli.environments.registry import ENVIRONMENTS
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime import factories

FROM_MODEL = "from-model"
"""The task of networks that compute their own loss."""


def uses_environments(config: Config) -> bool:
    """Whether a request names environments rather than a dataset."""
    return config.task.name == "ppo" or names_builtin_environments(config)


def choose_form(inputs: int | None, task: str | None) -> SampleForm:
    """What of a sample are inputs: by data.inputs, and by what the task is to do with them.

    A task of the user's own may need no targets; from-model hands a dict to the network as it is.
    """
    own = task is not None and ":" in task
    return SampleForm(inputs, needs_target=not own and task != FROM_MODEL, keeps_mappings=task == FROM_MODEL)


def open_data(config: Config, moved: Moved = lambda: None) -> DataSource:
    """Load the dataset, or probe the environments, that --data names; `moved` is called as samples are read.

    Raises:
        RequestError: it does not exist, or is invalid.
    """
    if not uses_environments(config):
        form = choose_form(config.data.inputs, config.task.name)
        return load_data_source(config.data, config.reproducibility.seed, form, model_dir=config.model.dir, moved=moved)
    from multigpu_cli.tasks.ppo.env_source import open_environments  # late: datasets do not need PPO

    return open_environments(config)


def check_has_samples(config: Config, what: str) -> None:
    """Refuse environments where the samples of a dataset are needed.

    Raises:
        RequestError: --data names environments.
    """
    if uses_environments(config):
        raise RequestError(
            f"{what} needs the samples of a dataset, and --data {config.data.name} names environments",
            remedy="another --data; train, evaluate, status, report and verify support environments",
        )


def find_data_factory(config: Config) -> Callable[..., Any]:
    """The factory that --data names."""
    if not uses_environments(config):
        return factories.find_factory(config.data.name, DATASETS, flag="--data")
    from multigpu_cli.tasks.ppo.env_source import find_group_factory

    return find_group_factory(config)[0]


def names_builtin_environments(config: Config) -> bool:
    """Whether --data names built-in environments (gym:CartPole-v1), in spite of its colon."""
    return config.data.name.partition(":")[0] in ENVIRONMENTS
