"""What learns is built so that it is fast, where its model allows that."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.config.sources import resolve
from multigpu_cli.run.learner import Learner, build_learner
from multigpu_cli.run.settle import settle
from multigpu_cli.runtime.devices import Choice
from multigpu_cli.runtime.world import World

CPU = torch.device("cpu")


class Viewing(nn.Module):
    """Reads its features as they lie in memory, as many a user's network does."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.convolve, self.classify = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.convolve(images)
        logits: Tensor = self.classify(features.view(len(images), -1))
        return logits


def learner(folder: Path, **flags: Any) -> Learner:
    config = resolve({"save_dir": str(folder), "max_steps": "2"} | flags, [], None)
    choice, world = Choice("single", (CPU,), 0, "a test"), World(CPU)
    return build_learner(settle(config, choice, world), choice, world)


@pytest.mark.parametrize(("model", "last"), [("convnet", True), ("tests.run.test_learner:Viewing", False)])
def test_kernels_lie_with_channels_last_where_the_model_can_take_it(model: str, last: bool, tmp_path: Path) -> None:
    kernels = [p for p in learner(tmp_path, model=model).kept.model.parameters() if p.ndim == 4]
    assert [p.is_contiguous(memory_format=torch.channels_last) for p in kernels if p.shape[1] > 1] == [True] * (
        len(kernels) - 1 if last else 0
    )
    assert all(p.is_contiguous() for p in kernels) is not last
