"""Actor-critics: shapes, and a memory that ends where an episode does."""

from typing import Any

import torch
from torch import nn

from multigpu_cli.environments.base import Box, Discrete
from multigpu_cli.rl.policy import ActorCritic, RecurrentActorCritic, unroll_lstm


def test_outputs_for_discrete_and_real_actions() -> None:
    observations, begun = torch.randn(5, 3, 2, 4), torch.zeros(5, 3)
    outputs, values, memory = ActorCritic((2, 4), 3, Discrete(3))(observations, begun, torch.zeros(3, 0))
    assert (outputs.shape, values.shape, memory.shape) == ((5, 3, 3), (5, 3), (3, 0))
    model: Any = RecurrentActorCritic((2, 4), 6, Box((3,), -1.0, 1.0), hidden=7)
    outputs, values, memory = model(observations, begun, torch.zeros(3, 14))
    assert (outputs.shape, values.shape, memory.shape, model.memory_size) == ((5, 3, 6), (5, 3), (3, 14), 14)
    assert outputs[..., 3:].unique().tolist() == [0.0], "the logarithm of a deviation of 1"


def test_a_memory_is_forgotten_where_an_episode_begins_and_nowhere_else() -> None:
    """Against single steps of an LSTMCell with the same weights, and all gradients too."""
    torch.manual_seed(0)
    lstm = nn.LSTM(2, 3).double()
    inputs = torch.randn(6, 4, 2, dtype=torch.float64)
    begun = torch.zeros(6, 4)
    begun[0, 1] = begun[2, 0] = begun[2, 3] = begun[5, 1] = 1
    memory = torch.randn(4, 6, dtype=torch.float64)
    found, last = unroll_lstm(lstm, inputs, begun, memory)
    found.square().sum().backward()
    gradients = [p.grad.clone() for p in lstm.parameters() if p.grad is not None]
    lstm.zero_grad()
    cell = nn.LSTMCell(2, 3).double()
    for mine, theirs in zip(cell.parameters(), lstm.parameters(), strict=True):
        mine.data = theirs.data
    rows, state = [], memory
    for step in range(6):
        hidden, carried = (part * (1 - begun[step])[:, None] for part in state.chunk(2, 1))
        state = torch.cat(cell(inputs[step], (hidden, carried)), 1)
        rows.append(state[:, :3])
    torch.testing.assert_close(found, torch.stack(rows))
    torch.testing.assert_close(last, state)
    torch.stack(rows).square().sum().backward()
    for gradient, other in zip(gradients, cell.parameters(), strict=True):
        torch.testing.assert_close(gradient, other.grad)
