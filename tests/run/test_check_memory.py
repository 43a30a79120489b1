from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from multigpu_cli.api.from_objects import FromObjects
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.source import DataSource
from multigpu_cli.run.request import checks
from multigpu_cli.run.request.checks import forecast_state
from multigpu_cli.run.request.spec import FromConfig
from tests.support.run_training import run_training


def test_the_state_without_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model[0].bias.requires_grad_(False)
    buffers, all_weights, learning = 8 + 2 * 8 * 4, 4 * (40 + 16), 4 * (32 + 16)
    memory = forecast_state(model, resolve({}, [], None), FromConfig())
    assert (memory.weights, memory.gradients, memory.optimizer) == (all_weights + buffers, learning, 2 * learning)
    assert (memory.fixed, memory.per_sample) == (0, 0)
    memory = forecast_state(model, resolve({"optimizer": "sgd", "ema": "0.9"}, [], None), FromConfig())
    assert (memory.weights, memory.optimizer) == (2 * (all_weights + buffers), learning)
    monkeypatch.setattr(checks, "list_unsaved_parameters", lambda model: [model[0].bias])
    weights = [forecast_state(model, resolve({"ema": ema}, [], None), FromConfig()).weights for ema in ("off", "0.9")]
    assert weights == [all_weights + buffers, all_weights + buffers + learning], "the average shares what is not saved"
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    source = DataSource(train=TensorDataset(torch.zeros(1, 4)), val=None, test=None, input_shape=(4,), num_classes=2)
    own = FromObjects(source=source, model=model, optimizer=sgd)
    assert forecast_state(model, resolve({}, [], None), own).optimizer == 0
    assert all(parameter.device == torch.device("cpu") for parameter in model.parameters())


@pytest.mark.parametrize(
    ("flags", "kind"),
    [({}, "RequestError"), ({"batch_size": "auto"}, "RequestError"), ({"multi_gpu": "ddp"}, "TrainingError")],
)
def test_where_no_sample_fits_auto_names_sharding(flags: dict[str, Any], kind: str, in_tmp_path: None) -> None:
    greedy: dict[str, Any] = {"model": "tests.support.awkward_models:greedy", "batch_size": 2, "save_dir": "run"}
    ended = run_training(2, **greedy | flags, sets=["model.args.training=0"])
    assert (ended.kind, "--multi-gpu fsdp" in ended.error) == (kind, True), ended.error
    assert ("out of memory with a single sample on each of several devices" in ended.error) == (kind == "RequestError")
    assert not Path("run").exists()
