"""An environment of your own: python main_multi_gpu.py --data my_world:world --task ppo --num-envs 8."""

import torch

from multigpu_cli.environments.base import Discrete, EnvironmentGroup, StepReturn
from multigpu_cli.planning.batch import make_key


class Walk(EnvironmentGroup):
    """From somewhere on 0 … 7 to 8, one step at a time; cut off after 20."""

    observation_shape, action = (1,), Discrete(2)

    def __init__(self, numbers, seed, device):
        self.numbers, self.seed, self.device = numbers, seed, device

    def reset(self):
        self.episode = torch.zeros(len(self.numbers), dtype=torch.int64)
        self.steps, self.place = torch.zeros(2, len(self.numbers))
        return self.begun(torch.ones(len(self.numbers), dtype=torch.bool))

    def begun(self, which):  # episode k of environment i: by (seed, i, k) alone
        for at in which.nonzero().flatten().tolist():
            draws = torch.Generator().manual_seed(make_key(self.seed, self.numbers[at], int(self.episode[at])))
            self.place[at], self.steps[at] = torch.randint(8, (), generator=draws), 0
        return self.seen()

    def seen(self):
        return (self.place[:, None] / 8).to(self.device)

    def step(self, actions):
        self.place, self.steps = (self.place + 2 * actions.cpu() - 1).clamp(0, 8), self.steps + 1
        terminated, truncated, last = self.place == 8, self.steps == 20, self.seen()
        self.episode += terminated | truncated
        reward = terminated.float() - 0.01
        return StepReturn(self.begun(terminated | truncated), reward.to(self.device), terminated, truncated, last)

    def state(self):
        return {"place": self.place.clone(), "steps": self.steps.clone(), "episode": self.episode.clone()}

    def load_state(self, state):
        self.place, self.steps, self.episode = (state[name].clone() for name in ("place", "steps", "episode"))
        return self.seen(), 0  # how many had to begin their episode anew


def world(numbers, seed, device):
    return Walk(numbers, seed, device)
