"""Environments in the place of a dataset: the arithmetic, and what does not go together."""

from typing import Any

import pytest
import torch

from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.load import uses_environments
from multigpu_cli.environments.base import Box, Discrete
from multigpu_cli.errors import RequestError
from multigpu_cli.rl.env_source import EnvSource, open_environments

OWN = {"data": "tests.support.toy_env:corridor", "task": "ppo"}


def request(*sets: str, **flags: Any) -> Config:
    return resolve(OWN | flags, sets, None)


def open_env(*sets: str, **flags: Any) -> EnvSource:
    return open_environments(request(*sets, **flags))


def test_what_is_a_matter_of_acting() -> None:
    assert uses_environments(resolve({"data": "gym:CartPole-v1"}, (), None))
    assert uses_environments(request())
    assert not uses_environments(resolve({}, (), None))


def test_an_epoch_is_one_update() -> None:
    source = open_env("task.args.rollout=32", "task.args.passes=3", num_envs=24, env_group=4, env_steps=2000)
    assert (source.num_train_samples, source.fixed_batch_sizes) == (24 * 32 * 3, (32, 6 * 32))
    assert (source.groups, source.steps, source.epochs) == (6, 768, 3)
    assert (source.action, source.num_classes, source.input_shape) == (Discrete(2), 2, (2,))


def test_the_shorter_of_epochs_and_environment_steps() -> None:
    assert open_env(num_envs=16, env_steps=10_000, epochs=3).epochs == 3
    assert open_env(num_envs=16, env_steps=2049, epochs=3).epochs == 2
    assert open_env(num_envs=16, epochs=7).epochs == 7


def test_real_actions_have_means_and_deviations() -> None:
    source = open_env("data.args.real=true")
    assert (source.action, source.num_classes) == (Box((1,), -1.0, 1.0), 2)


def test_the_batch_size_says_how_many_minibatches() -> None:
    assert open_env(num_envs=8, env_group=4, batch_size=64).fixed_batch_sizes == (64, 128)


def test_splits_have_other_randomness() -> None:
    source = open_env()
    train, val = (source.make(split, range(4), torch.device("cpu")).reset() for split in ("train", "val"))
    assert not torch.equal(train, val)


@pytest.mark.parametrize(
    ("sets", "flags", "words"),
    [
        ([], {"num_envs": 10, "env_group": 4}, r"--num-envs 10 is not a multiple of --env-group 4\n.*--num-envs 12"),
        ([], {"batch_size": "auto"}, "--batch-size auto"),
        ([], {"global_batch_size": 64}, "--global-batch-size: with --task ppo"),
        ([], {"grad_accum_steps": 2}, "--grad-accum-steps: with --task ppo"),
        ([], {"batch_size": 100}, "--batch-size 100 does not divide the 1024 decisions"),
        (["task.args.minibatches=3"], {}, "task.args.minibatches 3 does not divide"),
        (["task.args.minibatches=8"], {"batch_size": 256}, "--batch-size 256 disagrees with task.args.minibatches 8"),
        (["task.args.gama=1"], {}, "task.args.gama: .*did you mean 'gamma'"),
        (["data.args.limits=1"], {}, "data.args.limits: .*did you mean 'limit'"),
        ([], {"data": "tests.support.user_code:tensors"}, "tests.support.user_code:tensors"),
        ([], {"data": "digits"}, "unknown name 'digits'"),
    ],
)
def test_numbers_that_do_not_go_together(sets: list[str], flags: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=f"(?s){words}"):
        open_env(*sets, **flags)
