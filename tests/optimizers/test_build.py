from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.build import build_optimizer, set_rate
from multigpu_cli.planning.schedule import OPTIMIZERS


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 3))


def build(name: str, model: nn.Module, decay: float = 0.1) -> torch.optim.Optimizer:
    return build_optimizer(model, OptimizerConfig(name=name, weight_decay=decay))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_matrices_and_kernels_decay(name: str) -> None:
    model = network()
    decaying, plain = build(name, model).param_groups
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert [p is q for p, q in zip(decaying["params"], (model[0].weight, model[3].weight), strict=True)] == [True] * 2
    assert {p.ndim for p in plain["params"]} == {1}
    assert len(plain["params"]) == 4


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_frozen_parameters_are_left_out_and_no_group_is_empty(name: str) -> None:
    model = network()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model[3].bias)
    [only] = build(name, model).param_groups
    assert only["params"] == [model[3].bias]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_every_group_gets_the_rate_of_the_schedule(name: str) -> None:
    optimizer = build(name, network())
    assert all(group["lr"] == 0.0 for group in optimizer.param_groups), "nothing moves before a rate is set"
    set_rate(optimizer, 0.25)
    assert all(group["lr"] == 0.25 for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adamw", lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=False, foreach=False)),
        ("sgd", lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True, fused=False)),
    ],
)
def test_it_is_the_textbook_optimizer(name: str, reference: object) -> None:
    ours, plain = (nn.Sequential(network()[0], nn.Flatten(), nn.Linear(8, 3)).double() for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    optimizer = build(name, ours)
    set_rate(optimizer, 0.01)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    textbook = reference(groups)  # type: ignore[operator]
    for step in range(5):
        inputs = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for model, either in ((ours, optimizer), (plain, textbook)):
            either.zero_grad()
            model(inputs).square().sum().backward()
            either.step()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_a_skipped_step_is_told_by_a_tensor() -> None:
    """What runtime/precision.py relies on: fused optimizers look at `found_inf`, also on CPU."""
    for name in ("adamw", "sgd"):
        model = network()
        optimizer = build(name, model)
        set_rate(optimizer, 0.1)
        before = fingerprint(model.state_dict())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
        optimizer.step()
        assert fingerprint(model.state_dict()) == before
        optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        optimizer.step()
        assert fingerprint(model.state_dict()) != before


def test_momentum_begins_at_zero() -> None:
    model = network()
    optimizer = build("sgd", model)
    momenta: list[Tensor] = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all(float(m.abs().max()) == 0.0 for m in momenta)


def test_torchs_own_arguments_are_passed_on() -> None:
    adamw = build_optimizer(network(), OptimizerConfig(args={"betas": [0.9, 0.95], "eps": 1e-6}))
    assert {(*group["betas"], group["eps"], group["fused"]) for group in adamw.param_groups} == {
        (0.9, 0.95, 1e-6, True)
    }
    sgd = build_optimizer(network(), OptimizerConfig(name="sgd", args={"momentum": 0, "nesterov": False}))
    assert not sgd.state


def test_amsgrad_and_maximize_are_torchs_own_step() -> None:
    ways: list[dict[str, Any]] = [{"amsgrad": True}, {"maximize": True}]
    for args in ways:
        ours, theirs = network(), network()
        first = build_optimizer(ours, OptimizerConfig(args=args))
        second = torch.optim.AdamW(build_optimizer(theirs, OptimizerConfig(args=args)).param_groups, fused=True, **args)
        for number in range(3):
            for model, optimizer in ((ours, first), (theirs, second)):
                torch.manual_seed(number)
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                set_rate(optimizer, 0.01)
                optimizer.step()
        assert fingerprint(ours.state_dict()) == fingerprint(theirs.state_dict())


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"beta": 1}, r"optimizer\.args\.beta: .*AdamW.* has no such parameter"),
        ({"betas": [2, 3]}, "Invalid beta parameter"),
        ({"lr": 1.0}, r"optimizer\.args\.lr can't be set here"),
    ],
)
def test_arguments_that_torch_does_not_take_are_refused(args: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        build_optimizer(network(), OptimizerConfig(args=args))


def test_our_step_is_torchs_to_the_last_bit() -> None:
    """With skipped steps, parameters that have no gradient now and then, and a state that went through a checkpoint."""
    ours, theirs = network(), network()
    first = build("adamw", ours)
    second = torch.optim.AdamW(build_optimizer(theirs, OptimizerConfig(weight_decay=0.1)).param_groups, fused=True)
    for number, skipped in enumerate([0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]):
        for model, optimizer in ((ours, first), (theirs, second)):
            torch.manual_seed(number)
            for name, parameter in model.named_parameters():
                absent = name.startswith("1.") and number in (0, 4)
                parameter.grad = None if absent else torch.randn_like(parameter)
            set_rate(optimizer, 0.01 * (number + 1))
            optimizer.found_inf = torch.tensor(skipped)  # type: ignore[attr-defined]
            optimizer.step()
        if number == 2:
            state = first.state_dict()
            first = build("adamw", ours)
            first.load_state_dict(state)
    assert fingerprint(ours.state_dict()) == fingerprint(theirs.state_dict())
    steps = [[float(state["step"]) for state in optimizer.state.values()] for optimizer in (first, second)]
    assert steps[0] == steps[1]


def test_a_group_without_any_gradient_is_left_as_it_is() -> None:
    """Its parameters took no part in this step's loss: all biases, for instance."""
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, OptimizerConfig())
    set_rate(optimizer, 0.1)
    for biased in (True, False):
        nn.functional.linear(torch.ones(1, 2), model.weight, model.bias if biased else None).sum().backward()
        before = [parameter.detach().clone() for parameter in (model.weight, model.bias)]
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model.weight, before[0])
    assert torch.equal(model.bias, before[1])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_state_of_another_memory_layout_is_brought_into_that_of_the_weights(name: str) -> None:
    """Fused kernels on CPU mix up elements whose layouts differ, without a word."""
    ends = []
    for later in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(4, 8, 3)
        optimizer = build(name, model)
        for number in range(4):
            if number == 2:
                model.to(memory_format=later)  # type: ignore[call-overload]
                state, optimizer = optimizer.state_dict(), build(name, model)
                optimizer.load_state_dict(state)
            set_rate(optimizer, 0.1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.grad = torch.empty_like(parameter).fill_(0.1 * number).add_(parameter)
            optimizer.step()
        ends.append(fingerprint(model.state_dict()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["adamw", "sgd", "adam"])
def test_complex_weights_take_steps_without_fused_kernels(name: str) -> None:
    model = nn.Linear(4, 4)
    model.weight, model.bias = (nn.Parameter(p.detach() * (1 + 1j)) for p in (model.weight, model.bias))
    before = model.weight.detach().clone()
    optimizer = build(name, model, 0.0)
    set_rate(optimizer, 0.1)
    for _ in range(3):  # the first one creates the state
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert bool((model.weight != before).all())


@pytest.mark.parametrize("number", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weights_of_16_bits_move_on_a_cpu_too(name: str, number: torch.dtype) -> None:
    """torch's fused SGD leaves them as they are; a checkpoint of a GPU says that its optimizer was a fused one."""
    model = nn.Linear(64, 64).to(number)
    optimizer = build(name, model, 0.0)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["fused"] = True
    optimizer.load_state_dict(state)
    before = model.weight.detach().clone()
    set_rate(optimizer, 0.1)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    moved = before - model.weight.detach()
    assert torch.allclose(moved, torch.full_like(moved, 0.1 if name == "adamw" else 0.19), atol=2e-3)


def test_a_model_of_several_dtypes_moves_as_with_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel of CUDA refuses a list of several; that of the CPU does not mind."""
    real, asked = torch._fused_adamw_, []

    def kernel(parameters: list[Tensor], *lists: Any, **settings: Any) -> Any:
        asked.append({p.dtype for p in parameters})
        return real(parameters, *lists, **settings)

    ours, theirs = (nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()]) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = build("adamw", ours)
    set_rate(optimizer, 0.01)
    groups = [
        {"params": [layer.weight for layer in theirs], "weight_decay": 0.1},
        {"params": [layer.bias for layer in theirs], "weight_decay": 0.0},
    ]
    textbook = torch.optim.AdamW(groups, lr=0.01, fused=True)
    monkeypatch.setattr(torch, "_fused_adamw_", kernel)
    for step in range(3):
        for model, either in ((ours, optimizer), (theirs, textbook)):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * (step + 1) + number)
            either.step()
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all(len(dtypes) == 1 for dtypes in asked)
    assert len(asked) == 2 * 3 * 4


OWN = "tests.support.optimizers:"


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "muon"])
def test_torchs_optimizers_by_name_move_the_weights(name: str) -> None:
    model = network()
    optimizer = build(name, model)
    assert type(optimizer).__name__ == OPTIMIZERS[name].class_name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    before = fingerprint(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    set_rate(optimizer, 0.01)
    optimizer.step()
    assert fingerprint(model.state_dict()) != before


def test_an_own_class_gets_the_arguments_and_the_peak_rate() -> None:
    config = OptimizerConfig(name=f"{OWN}Manifold", args={"depth": 3})
    optimizer = build_optimizer(network(), config, rate=0.5)
    assert optimizer.defaults["lr"] == 0.5
    assert {len(state["sums"]["all"]) for state in optimizer.state.values()} == {3}
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            {"name": f"{OWN}Manifold", "args": {"dept": 3}},
            r"args\.dept: .*Manifold has no such.*\n.*'depth'",
        ),
        ({"name": f"{OWN}Manyfold"}, "has no 'Manyfold'"),
        ({"name": "torch.optim:LBFGS"}, "closure"),
        ({"name": f"{OWN}no_optimizer"}, "a str is not a torch.optim.Optimizer"),
        ({"name": f"{OWN}Rateless"}, "have no 'lr'"),
        ({"name": f"{OWN}Plain", "weight_decay": 0.3}, "it has no weight decay"),
        ({"name": "adam", "args": {"betas": [2, 3]}}, "Invalid beta"),
    ],
)
def test_what_can_not_be_used_is_refused_by_name(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        build_optimizer(network(), OptimizerConfig(**asked))


def test_a_state_keeps_its_formats_and_what_is_nested() -> None:
    """torch alone makes all of them float32."""
    model, config = network(), OptimizerConfig(name=f"{OWN}Manifold")
    first, second = (build_optimizer(model, config, rate=0.1) for _ in range(2))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    first.step()
    second.load_state_dict(deepcopy(first.state_dict()))
    for parameter in model.parameters():
        old, new = first.state[parameter], second.state[parameter]
        assert new["count"].dtype == torch.int64
        assert new["last"] == old["last"]
        assert new["name"] == "w"
        for one, other in zip(old["sums"]["all"], new["sums"]["all"], strict=True):
            assert other.dtype == torch.float64
            assert torch.equal(one, other)
            assert one.data_ptr() != other.data_ptr()


def test_loading_other_parameter_groups_is_refused() -> None:
    model = network()
    state = build("adamw", model).state_dict()
    model[0].requires_grad_(False)
    with pytest.raises(RequestError, match=r"parameter groups of \[1, 3\] tensors, and the checkpoint's of \[2, 4\]"):
        build("adamw", model).load_state_dict(state)
