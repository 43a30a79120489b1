"""Datasets and environments behind one --data."""

import pytest

from multigpu_cli.config.code_names import names_environments
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.load import check_has_samples, find_data_factory, open_data
from multigpu_cli.errors import RequestError
from multigpu_cli.rl.env_source import EnvSource

WORLD = {"data": "tests.support.toy_env:corridor", "task": "ppo"}


def test_what_is_opened() -> None:
    assert isinstance(open_data(resolve(WORLD, (), None)), EnvSource)
    assert not isinstance(open_data(resolve({}, (), None)), EnvSource)


def test_what_needs_samples_refuses_environments() -> None:
    check_has_samples(resolve({}, (), None), "export")
    with pytest.raises(
        RequestError, match=r"export needs the samples of a dataset, and --data tests\.support\.toy_env:corridor"
    ):
        check_has_samples(resolve(WORLD, (), None), "export")


def test_whose_code_it_is() -> None:
    assert names_environments(resolve({"data": "gym:CartPole-v1"}, (), None))
    assert not names_environments(resolve(WORLD, (), None))
    assert find_data_factory(resolve(WORLD, (), None)).__name__ == "corridor"
    assert find_data_factory(resolve({"data": "gym:CartPole-v1"}, (), None)).__name__ == "GymGroup"
    assert find_data_factory(resolve({}, (), None)).__name__ == "digits"
