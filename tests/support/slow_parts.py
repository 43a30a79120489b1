"""Users' parts that take their time on rank 0, while the others wait for it."""

import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from multigpu_cli.environments.base import EnvironmentGroup, StepReturn
from tests.support.toy_env import Corridor
from tests.support.user_code import net


def pause(pieces: int) -> None:
    """As the environment says: SLOW seconds a piece, and at piece STANDS a minute."""
    if os.environ.get("RANK") == "0":
        time.sleep(60 if pieces == int(os.environ["STANDS"]) else float(os.environ["SLOW"]))


class Evaluated(nn.Module):
    """Passes its input on, slowly where it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            self.pieces += 1
            pause(self.pieces)
        return inputs


def evaluated(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    return nn.Sequential(Evaluated(), net(input_shape, num_classes, norm=False))


class Trudging(Corridor):
    """Each step takes a while."""

    pieces = 0

    def step(self, actions: Tensor) -> StepReturn:
        self.pieces += 1
        pause(self.pieces)
        return super().step(actions)


def trudging(numbers: tuple[int, ...], seed: int, device: torch.device) -> EnvironmentGroup:
    return Trudging(numbers, seed, device, 5, False)
