"""Cascaded LSTMs: the output of one over a window of observations is the input of those of actor and critic.

Source: Zou, Lou, Wang and Liu, "A Novel Deep Reinforcement Learning Based Automated Stock Trading System Using Cascaded
LSTM Networks" (CLSTM-PPO), arXiv 2212.02721, 2022.
"""

from math import prod
from typing import Any

from torch import Tensor, cat, nn

from multigpu_cli.models.actor_critic import Heads, orthogonal, orthogonal_lstm, unroll_lstm
from multigpu_cli.models.normalizer import Normalizer


class CascadedActorCritic(nn.Module):
    """An LSTM extractor over each observation's window, then one LSTM over time for the actor and one for the critic.

    Args:
        input_shape: (window, …), the last observations with the newest at the end; one dimension is a window of one.
        extractor_rate: the extractor's learning rate, as a share of the schedule's.

    Attributes:
        rate_factors: prefixes of parameter names, and the factors for their learning rate.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        action: Any,
        features: int,
        hidden: int,
        extractor_rate: float,
    ) -> None:
        super().__init__()
        self.window = input_shape if len(input_shape) > 1 else (1, *input_shape)
        self.memory_size = 4 * hidden
        self.rate_factors = {"extractor.": extractor_rate} if extractor_rate != 1 else {}
        self.normalizer = Normalizer(input_shape)
        self.extractor = nn.ModuleDict(
            {
                "lstm": orthogonal_lstm(nn.LSTM(prod(self.window[1:]), features)),
                "linear": orthogonal(nn.Linear(features, features), 2**0.5),
            }
        )
        self.actor, self.critic = (orthogonal_lstm(nn.LSTM(features, hidden)) for _ in range(2))
        self.heads = Heads(hidden, outputs, action)
        self.value = orthogonal(nn.Linear(hidden, 1), 1.0)

    def forward(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, size = begun.shape
        window = self.normalizer(observations).view(steps * size, self.window[0], -1).transpose(0, 1)
        read, _ = self.extractor["lstm"](window)
        features = self.extractor["linear"](read[-1]).tanh().view(steps, size, -1)
        own, critics = memory.chunk(2, -1)
        acted, own = unroll_lstm(self.actor, features, begun, own)
        valued, critics = unroll_lstm(self.critic, features, begun, critics)
        return self.heads(acted), self.value(valued).squeeze(-1), cat([own, critics], -1)


def build(
    input_shape: tuple[int, ...],
    num_classes: int,
    action: Any,
    features: int = 128,
    hidden: int = 128,
    extractor_rate: float = 1.0,
) -> nn.Module:
    """CLSTM: an extractor of `features` units, actor and critic of `hidden` units each."""
    return CascadedActorCritic(input_shape, num_classes, action, features, hidden, extractor_rate)
