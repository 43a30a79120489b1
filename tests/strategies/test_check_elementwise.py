from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.build import build_optimizer
from multigpu_cli.strategies.fsdp.probe import check_is_elementwise


class Normalizing(torch.optim.SGD):
    """Divides each gradient by its norm, as LARS and LAMB do with a step."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        super().step()


class Accumulating(torch.optim.Optimizer):
    """Makes its state in its constructor, and nowhere else, as Adagrad does before torch 2.13."""

    def __init__(self, parameters: Iterable[Tensor], *, by_row: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1, "by_row": by_row})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            self.state[parameter] = {"sum": torch.full_like(parameter, 0.5), "step": torch.zeros(()), "power": 0.5}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, square = self.state[parameter], parameter.grad.square()
                state["step"] += 1
                state["sum"] += square.mean() if group["by_row"] else square
                parameter -= group["lr"] * parameter.grad / state["sum"] ** state["power"]


class Blockwise(torch.optim.SGD):
    """Scales weights of 4,096 elements and more by blocks of 256, and keeps the scales, as 8-bit Adam does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.numel() >= 4096:
                self.state[parameter]["absmax1"] = parameter.grad.flatten().view(-1, 256).abs().amax(1)
        super().step()


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_ours_are_elementwise_and_the_check_leaves_nothing_behind(name: str) -> None:
    model = build()
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    StepLR(optimizer, 1)
    before = [p.clone() for p in model.parameters()], str(optimizer.state_dict()), torch.get_rng_state()
    check_is_elementwise(optimizer)
    after = list(model.parameters()), str(optimizer.state_dict()), torch.get_rng_state()
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    assert all(map(torch.equal, before[0], after[0]))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_torchs_own_that_are_elementwise(kind: type[torch.optim.Optimizer]) -> None:
    check_is_elementwise(kind(build().parameters(), lr=0.1))  # type: ignore[call-arg]


@pytest.mark.parametrize("size", [(0, 4), (3, 4), (1,)])
def test_what_a_constructor_keeps_is_there_in_the_trial(size: tuple[int, ...]) -> None:
    parameters = [nn.Parameter(torch.ones(size))]
    optimizer = Accumulating(parameters)
    check_is_elementwise(optimizer)
    assert torch.equal(optimizer.state[parameters[0]]["sum"], torch.full(size, 0.5)), "and it is left alone"
    with pytest.raises(RequestError, match="Accumulating needs all of them"):
        check_is_elementwise(Accumulating(parameters, by_row=True))


def test_one_that_has_taken_steps_is_refused_too() -> None:
    """Its state is in rows and columns."""
    model = build()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(RequestError, match="Adafactor needs all of them"):
        check_is_elementwise(optimizer)


class Picky(Normalizing):
    """Of weights of so many dimensions only."""

    def __init__(self, parameters: Iterable[Tensor], dimensions: int) -> None:
        super().__init__(parameters)
        self.dimensions = dimensions

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == self.dimensions:
                    parameter.grad /= parameter.grad.norm()
        torch.optim.SGD.step(self)


@pytest.mark.parametrize(("dimensions", "shapes"), [(2, ((3,), (3, 4))), (2, ((3, 4), (3,))), (1, ((3,), (4,)))])
def test_matrices_are_tried_where_a_group_has_any_and_else_vectors(
    dimensions: int, shapes: Sequence[Sequence[int]]
) -> None:
    with pytest.raises(RequestError, match="Picky needs all of them"):
        check_is_elementwise(Picky([nn.Parameter(torch.ones(*shape)) for shape in shapes], dimensions))


def list_matrices(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


@pytest.mark.parametrize("kind", [Normalizing, torch.optim.Adafactor])
def test_those_that_need_the_whole_weight_are_refused(kind: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(RequestError, match=f"{kind.__name__} needs all of them"):
        check_is_elementwise(kind(build().parameters(), lr=0.1))  # type: ignore[call-arg]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_refused() -> None:
    with pytest.raises(RequestError, match="Muon needs all of them"):
        check_is_elementwise(torch.optim.Muon(list_matrices(build()), lr=0.1))


@pytest.mark.parametrize("shape", [(3, 4), (5,)])
def test_fsdp_refuses_states_of_another_shape_than_their_weight(shape: tuple[int, ...]) -> None:
    """Small weights, as in a trial of few numbers, have none."""
    with pytest.raises(RequestError, match=r"all of them: its state absmax1 has shape \(32,\) for a weight of"):
        check_is_elementwise(Blockwise([nn.Parameter(torch.ones(shape))], lr=0.1))
