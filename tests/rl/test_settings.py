"""What task.args may not say."""

from typing import Any

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.rl.objective import PPOSettings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rollout": 0}, "rollout: 0"),
        ({"passes": 2.5}, "passes: 2.5"),
        ({"gamma": 1.5}, "gamma: 1.5\n.*from 0 to 1"),
        ({"target_kl": -1}, "target_kl: -1\n.*at least 0"),
        ({"clip": True}, "clip: True"),
        ({"normalize_rewards": "yes"}, "normalize_rewards: 'yes'"),
    ],
)
def test_a_wrong_number_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=rf"task\.args\.{words}"):
        PPOSettings(**wrong)
