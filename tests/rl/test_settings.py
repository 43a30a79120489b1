"""What task.args may not say."""

from typing import Any

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.rl.objective import PPOSettings
from multigpu_cli.runtime.factories import call_factory


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rollout": 0}, "rollout must be a whole number of at least 1, not 0"),
        ({"passes": 2.5}, "passes must .* not 2.5"),
        ({"gamma": 1.5}, "gamma must be a number of at least 0 and at most 1, not 1.5"),
        ({"target_kl": -1}, "target_kl must be a number of at least 0, not -1"),
        ({"clip": True}, "clip must .* not True"),
        ({"normalize_rewards": "maybe"}, "normalize_rewards must be true or false, not 'maybe'"),
    ],
)
def test_a_wrong_number_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=rf"task\.args\.{words}"):
        call_factory(PPOSettings, {}, wrong, where="task")
