"""All ranks begin with what rank 0 brought."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.run.request.spec import UserObjects, broadcast_weights
from tests.support.awkward_models import Telling
from tests.support.ranks import run_on_each_rank
from tests.support.user_code import tensors

SOURCE = DataSource(train=tensors("train", 42), val=None, test=None, input_shape=(3,), num_classes=2)


def test_every_rank_gets_the_weights_of_rank_0_and_what_they_come_with() -> None:
    def work(world: World) -> Any:
        torch.manual_seed(world.rank)
        model = Telling(3, 2, ["of rank", world.rank])
        broadcast_weights(model, world)
        return [model.kept, model.layer.weight.tolist()]

    first, second = run_on_each_rank(2, work)
    assert first == second
    assert first[0] == ["of rank", 0]


def test_the_plan_names_what_moves_the_rate() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert UserObjects(SOURCE, model, optimizer=optimizer).explain_rate("") == "that of your SGD"
    by_epoch = UserObjects(SOURCE, model, optimizer=optimizer, scheduler=StepLR(optimizer, 1))
    assert by_epoch.explain_rate("epoch") == "that of your SGD, moved by StepLR after each epoch"


def test_an_optimizer_moves_what_learns_and_nothing_else() -> None:
    def read_refusal(model: nn.Module, parameters: Iterable[Tensor]) -> str:
        optimizer = torch.optim.SGD(parameters, 0.1)
        try:
            assert UserObjects(SOURCE, model, optimizer=optimizer).prepare_optimizer(model) is optimizer
        except RequestError as error:
            return str(error)
        return ""

    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    assert read_refusal(model, model.parameters()) == ""
    assert "it does not move bias" in read_refusal(model, [model.weight])
    assert "it moves 2 parameter(s) not its own" in read_refusal(model, [*model.parameters(), *other.parameters()])
    model.bias.requires_grad_(False)
    assert read_refusal(model, [model.weight]) == read_refusal(model, model.parameters()) == ""
