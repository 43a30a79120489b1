"""What a request is to be trained on: a dataset, or environments to act in."""

from collections.abc import Callable
from typing import Any

from multigpu_cli.config.schema import Config
from multigpu_cli.data.base import Source
from multigpu_cli.data.registry import DATASETS
from multigpu_cli.data.source import open_source
from multigpu_cli.runtime import plugins
from multigpu_cli.tasks.ppo.acting import acts, maker, open_environments


def opened(config: Config) -> Source:
    """Load the dataset, or look at the environments, that --data names.

    Raises:
        RequestError: there is none, or it is not what it should be.
    """
    return open_environments(config) if acts(config) else open_source(config.data, config.reproducibility.seed)


def maker_of(config: Config) -> Callable[..., Any]:
    """The factory that --data names."""
    return maker(config)[0] if acts(config) else plugins.find(config.data.name, DATASETS, flag="--data")
