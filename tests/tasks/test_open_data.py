"""Datasets and environments behind one --data."""

import pytest

from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import RequestError
from multigpu_cli.tasks.open_data import environments_of_ours, maker_of, of_samples, opened
from multigpu_cli.tasks.ppo.env_source import EnvSource

WORLD = {"data": "tests.support.toy_env:corridor", "task": "ppo"}


def test_what_is_opened() -> None:
    assert isinstance(opened(resolve(WORLD, (), None)), EnvSource)
    assert not isinstance(opened(resolve({}, (), None)), EnvSource)


def test_what_needs_samples_refuses_environments() -> None:
    of_samples(resolve({}, (), None), "export")
    with pytest.raises(RequestError, match=r"export needs the samples of a dataset, and --data tests\.acting:corridor"):
        of_samples(resolve(WORLD, (), None), "export")


def test_whose_code_it_is() -> None:
    assert environments_of_ours(resolve({"data": "gym:CartPole-v1"}, (), None))
    assert not environments_of_ours(resolve(WORLD, (), None))
    assert maker_of(resolve(WORLD, (), None)).__name__ == "corridor"
    assert maker_of(resolve({"data": "gym:CartPole-v1"}, (), None)).__name__ == "group"
    assert maker_of(resolve({}, (), None)).__name__ == "load"
