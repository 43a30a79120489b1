"""What outputs mean as a policy, beside torch's own distributions."""

import torch
from torch.distributions import Categorical, Normal

from multigpu_cli.environments.base import Box, Discrete
from multigpu_cli.rl.policy import build_policy


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_discrete_actions_are_judged_as_torch_does() -> None:
    policy = build_policy(Discrete(4))
    outputs, actions = torch.randn(7, 3, 4), torch.randint(4, (7, 3))
    log_probabilities, entropies = policy.evaluate_actions(outputs, actions)
    torch.testing.assert_close(log_probabilities, Categorical(logits=outputs).log_prob(actions))
    torch.testing.assert_close(entropies, Categorical(logits=outputs).entropy())


def test_discrete_actions_are_drawn_by_their_probabilities() -> None:
    policy = build_policy(Discrete(3))
    wanted = torch.tensor([0.2, 0.5, 0.3])
    actions = policy.choose_actions(wanted.log().expand(40_000, 3), policy.sample_noise((40_000,), draws()))
    torch.testing.assert_close(torch.bincount(actions) / 40_000, wanted, atol=0.01, rtol=0)
    assert int(policy.choose_actions(wanted.log(), None)) == 1, "without noise the likeliest"


def test_real_actions_are_judged_as_torch_does() -> None:
    policy = build_policy(Box((2, 2), -1.0, 1.0))
    outputs, actions = torch.randn(6, 8), torch.randn(6, 2, 2)
    normal = Normal(outputs[:, :4], outputs[:, 4:].exp())
    log_probabilities, entropies = policy.evaluate_actions(outputs, actions)
    torch.testing.assert_close(log_probabilities, normal.log_prob(actions.flatten(1)).sum(-1))
    torch.testing.assert_close(entropies, normal.entropy().sum(-1))


def test_real_actions_are_drawn_around_the_mean_and_clipped_only_for_the_environment() -> None:
    policy = build_policy(Box((1,), -1.0, 1.0))
    outputs = torch.tensor([0.5, 0.7]).log().expand(40_000, 2).clone()
    outputs[:, 0] = 0.9
    actions = policy.choose_actions(outputs, policy.sample_noise((40_000,), draws()))
    assert actions.shape == (40_000, 1)
    deviation, mean = torch.std_mean(actions)
    torch.testing.assert_close(torch.stack([mean, deviation]), torch.tensor([0.9, 0.7]), atol=0.02, rtol=0)
    assert float(policy.to_env_actions(actions).max()) == 1.0
    assert policy.choose_actions(outputs, None)[0].tolist() == [outputs[0, 0]]
