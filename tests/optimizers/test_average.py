from copy import deepcopy
from math import inf

import pytest
import torch
from torch import nn

from multigpu_cli.optimizers.eval_weights import EMAModel
from tests.support.awkward_models import Telling


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 3))


def value(module: nn.Module) -> float:
    return float(next(module.parameters()).detach())


def constant(start: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return model


def test_the_average_starts_at_the_first_weights_it_sees() -> None:
    model = constant(5.0)
    shadow = EMAModel(model, 0.9)
    nn.init.constant_(model.weight, 2.0)
    shadow.update_parameters(model)
    assert value(shadow) == 2.0


def test_the_decay_warms_up() -> None:
    """Decay (1+n)/(10+n) up to the one asked for, by hand."""
    model = constant(0.0)
    shadow = EMAModel(model, 0.5)
    expected = 0.0
    for count in range(30):
        weight = float(count % 7)
        nn.init.constant_(model.weight, weight)
        shadow.update_parameters(model)
        decay = 0.0 if count == 0 else min(0.5, (1 + count) / (10 + count))
        expected = decay * expected + (1 - decay) * weight
        assert value(shadow) == pytest.approx(expected, rel=1e-5), count


def test_buffers_are_averaged_and_counters_copied() -> None:
    model = network()
    shadow = EMAModel(model, 0.9)
    for _ in range(3):
        model(torch.randn(8, 2, 4))
        shadow.update_parameters(model)
    state, own = shadow.module.state_dict(), model.state_dict()
    assert list(state) == list(own)
    assert int(state["1.num_batches_tracked"]) == 3
    assert not torch.equal(state["1.running_mean"], own["1.running_mean"])
    assert float(state["1.running_mean"].norm()) > 0


def test_what_is_infinite_is_adopted_and_has_no_average() -> None:
    """Minus infinity in a mask less minus infinity would be NaN; the rest of that buffer has its average."""
    model, mask = nn.Module(), torch.tensor([0.0, -inf, -inf, 4.0])
    model.register_buffer("mask", mask)
    shadow = EMAModel(model, 0.9)
    for _ in range(2):
        shadow.update_parameters(model)
    mask.copy_(torch.tensor([0.0, -inf, 3.0, 2.0]))
    shadow.update_parameters(model)
    assert shadow.module.get_buffer("mask").tolist() == [0.0, -inf, 3.0, 2.5]


def test_a_skipped_step_leaves_all_as_it_is() -> None:
    model = Telling(3, 2, ["a"])
    shadow = EMAModel(model, 0.9)
    for skipped in (1.0, 0.0, 1.0):
        before = {name: deepcopy(value) for name, value in shadow.state_dict().items()}
        model.kept.append("b")
        nn.init.uniform_(next(model.parameters()))
        shadow.update_parameters(model, torch.tensor(skipped))
        after = shadow.state_dict()
        assert all(str(before[name]) == str(after[name]) for name in before) == bool(skipped)
    assert int(shadow.n_averaged) == 1


def test_the_average_takes_over_what_is_no_tensor() -> None:
    model = Telling(3, 2, ["a"])
    shadow = EMAModel(model, 0.9)
    model.kept.append("b")
    assert shadow.module.kept == ["a"]
    shadow.update_parameters(model)
    model.kept.append("c")
    assert shadow.module.kept == ["a", "b"]


def test_the_average_asks_the_device_for_no_number() -> None:
    """On a GPU the host would wait there, in each step: a meta tensor has none to read."""
    model = network().to("meta")
    shadow = EMAModel(model, 0.9)
    for _ in range(3):
        shadow.update_parameters(model)
    assert int(shadow.n_averaged) == 3


def test_the_average_is_not_trained() -> None:
    shadow = EMAModel(network(), 0.9)
    assert not any(p.requires_grad for p in shadow.parameters())
    model = network()
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_average_in_half_precision_is_rounded_only_once(dtype: torch.dtype) -> None:
    model = nn.Linear(40, 40, bias=False).to(dtype)
    shadow = EMAModel(model, 0.9)
    shadow.update_parameters(model)
    before = model.weight.detach().float()
    nn.init.normal_(model.weight)
    shadow.update_parameters(model)
    expected = torch.lerp(before, model.weight.detach().float(), 1 - 2 / 11).to(dtype)
    assert torch.equal(next(shadow.parameters()), expected)


def test_buffers_that_grow_are_adopted() -> None:
    model = nn.ModuleDict({"first": nn.Module(), "norm": nn.BatchNorm1d(2)})
    model.get_submodule("first").register_buffer("positions", torch.zeros(1), persistent=False)
    shadow = EMAModel(model, 0.9)
    shadow.update_parameters(model)
    first, norm = model.get_submodule("first"), model.get_submodule("norm")
    first.positions = torch.arange(5.0)
    first.register_buffer("late", torch.ones(2), persistent=False)
    norm.running_mean = torch.ones(2)
    shadow.update_parameters(model)
    average = shadow.module.get_submodule("first")
    assert torch.equal(average.get_buffer("positions"), torch.arange(5.0))
    assert average.positions is not first.positions, "the model may change its own"
    assert torch.equal(average.get_buffer("late"), torch.ones(2))
    assert shadow.module.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(shadow.module.get_buffer("norm.running_mean"), torch.full((2,), 9 / 11))
