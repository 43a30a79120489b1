"""The caller's own optimizer and scheduler, in place of those that the settings name."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from multigpu_cli.api.from_objects import FromObjects
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import plan_batches
from multigpu_cli.planning.schedule import Rate
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.strategies.base import Single
from tests.support.user_code import tensors
from tests.support.world import CPU

SOURCE = DataSource(train=tensors("train", 42), val=None, test=None, input_shape=(3,), num_classes=2)
BATCHES = plan_batches(samples=42, micro_batch=8, workers=1)


def test_the_plan_names_what_moves_the_rate() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config, rate = resolve({}, [], None), Rate(0.1, "given", "")
    own = FromObjects(source=SOURCE, model=model, optimizer=optimizer)
    assert own.explain_rate(config, rate, BATCHES, 1, 6) == (Rate(0.1, "given", "0.1, that of your SGD"), 0)
    by_epoch = FromObjects(source=SOURCE, model=model, optimizer=optimizer, scheduler=StepLR(optimizer, 1))
    said = "0.1, that of your SGD, moved by StepLR after each epoch"
    assert by_epoch.explain_rate(config, rate, BATCHES, 1, 6) == (Rate(0.1, "given", said), 6)


def test_an_optimizer_moves_what_learns_and_nothing_else(tmp_path: Path) -> None:
    config = resolve({"data": "digits", "save_dir": str(tmp_path / "run")}, [], None)
    plan = prepare_spec(config, Placement("single", (CPU,), 0, "a test"), World(CPU), FromConfig()).plan

    def read_refusal(model: nn.Module, parameters: Iterable[Tensor]) -> str:
        optimizer = torch.optim.SGD(parameters, 0.1)
        try:
            own = FromObjects(source=SOURCE, model=model, optimizer=optimizer)
            assert own.build_optimizer(config, plan, model, Single(model)) is optimizer
        except RequestError as error:
            return str(error)
        return ""

    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    assert read_refusal(model, model.parameters()) == ""
    assert "it does not move bias" in read_refusal(model, [model.weight])
    assert "it moves 2 parameter(s) not its own" in read_refusal(model, [*model.parameters(), *other.parameters()])
    model.bias.requires_grad_(False)
    assert read_refusal(model, [model.weight]) == read_refusal(model, model.parameters()) == ""
