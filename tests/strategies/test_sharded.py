from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, linear

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.models.blocks import find_blocks_to_wrap
from multigpu_cli.optimizers.build import build_optimizer, set_rate
from multigpu_cli.optimizers.eval_weights import EMAModel
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.runtime.module_state import preserve_buffers
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.strategies.base import Single, Strategy
from multigpu_cli.strategies.exact import ExactReduction
from multigpu_cli.strategies.fsdp.exact import ExactFSDP2
from multigpu_cli.strategies.fsdp.fsdp import FSDP2
from multigpu_cli.strategies.fsdp.probe import find_direct_use, list_groups
from multigpu_cli.strategies.fsdp.shard import ModelSharder
from tests.strategies.one_step import network, reduce_step, samples, strategy_model
from tests.support.ranks import run_on_each_rank

CPU = torch.device("cpu")
SHARES = {
    "even": BatchPlan(samples=24, micro_batch=4, global_batch=24, workers=3),
    "uneven": BatchPlan(samples=23, micro_batch=3, global_batch=23, workers=3),  # 2, 3 and 3 micro-batches, one short
    "idle": BatchPlan(samples=6, micro_batch=3, global_batch=6, workers=3),
    "one works": BatchPlan(samples=4, micro_batch=4, global_batch=4, workers=3),
}
Found = dict[str, Any]


class Tied(nn.Module):
    """Two layers of one weight, around layers of their own; one of them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(norm=True)
        self.head = nn.Linear(3, 3, bias=False).double()
        self.again = nn.Linear(3, 3).double()
        self.again.weight = self.head.weight
        self.again.bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.again(linear(self.inner(inputs), self.head.weight).tanh())
        return found


class Pair(nn.Module):
    """A block of two layers, the second of which is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, inputs: Tensor, *, whole: bool) -> Tensor:
        found: Tensor = self.always(inputs)
        return self.sometimes(found) if whole else found


class Late(Tied):
    """The second block does not run in the pass that prepares the training, and only its half in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(2))
        self.steps: set[float] = set()  # each has moved the weights

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.blocks
        found: Tensor = first(super().forward(inputs), whole=True)
        if not torch.is_grad_enabled():
            return found
        self.steps.add(float(self.head.weight.detach().sum()))
        return second(found, whole=len(self.steps) < 3)  # type: ignore[no-any-return]


def train(
    world: World,
    plan: BatchPlan,
    build: Callable[[], nn.Module],
    name: str = "adamw",
    *,
    exact: bool = False,
    reload: bool = False,
    **more: Any,
) -> Found:
    """Three steps as the engine does them, with clipping; the whole state of rank 0, and what this rank holds."""
    alone, sharded = (ExactReduction, ExactFSDP2) if exact else (Single, FSDP2)
    torch.manual_seed(7)
    model = build()
    average, strategy = EMAModel(model, 0.9), cast(Strategy, alone(model, world))
    if world.size > 1:
        blocks = find_blocks_to_wrap(model)
        strategy = sharded(model, world, average.module, blocks=blocks, **more)
    optimizer = build_optimizer(model, OptimizerConfig(name=name), moved=strategy.local_parameters)
    strategy.attach_optimizer(optimizer)
    set_rate(optimizer, 0.05)
    with preserve_buffers(model):
        strategy.warm_up(lambda: cross_entropy(strategy.callable(samples(2)[0]), samples(2)[1]))
    if reload:
        model.load_state_dict(model.state_dict())
    norms = []
    for _ in range(3):
        reduce_step(strategy, plan, world.rank)
        norm, _ = Precision("off", CPU).clip_and_step(optimizer, strategy.local_parameters, 0.05, strategy.total_norm)
        average.update_parameters(model)
        norms.append(float(norm))
    live = {"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    held += sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.ndim)
    groups = (strategy.num_shards, len(strategy.groups))
    return {"norms": norms, "state": plain(strategy.gather_state(live)), "held": held, "groups": groups}


def plain(state: Any) -> Any:
    """Numbers for the pipe between processes."""
    if isinstance(state, Tensor):
        return state.double().flatten().tolist()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, list | tuple) else state


def assert_alike(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_alike(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        for place, value in enumerate(expected):
            assert_alike(found[place], value, f"{where}.{place}")
    elif isinstance(expected, list):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12), where
    else:
        assert found == expected, where


@pytest.fixture(scope="module")
def together() -> list[dict[tuple[str, bool], dict[str, Any]]]:
    """What each of three workers has at the end, by share and whether weights are kept for a step; one launch."""

    def each(world: World) -> dict[tuple[str, bool], dict[str, Any]]:
        return {
            (share, keeps): train(world, SHARES[share], Tied, keeps_weights=keeps)
            for share in SHARES
            for keeps in (False, True)
        }

    return run_on_each_rank(3, each)


@pytest.mark.parametrize("keeps_weights", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("share", SHARES)
def test_workers_together_do_what_one_does(
    share: str, keeps_weights: bool, together: list[dict[tuple[str, bool], dict[str, Any]]]
) -> None:
    """Weights, statistics, average and both moments, from uneven and idle shares, with clipping and a tied weight."""
    one = BatchPlan(**vars(SHARES[share]) | {"workers": 1})
    expected = train(World(CPU), one, Tied)
    first, *others = [found[share, keeps_weights] for found in together]
    assert first["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    assert expected["norms"][0] > 0.05, "and it was clipped"
    assert_alike(first["state"], expected["state"])
    assert all(other["state"] == {} and other["norms"] == first["norms"] for other in others)


@pytest.mark.parametrize("reload", [False, True])
def test_the_optimizer_moves_the_weights_where_torch_pads_them_anew(
    reload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.8 copies a rank's rows at its first pass and after a load, where they are fewer than those of others."""
    torchs_own = FSDPParam.reset_sharded_param

    def pad_anew(self: Any) -> None:
        self.sharded_param._local_tensor = self.sharded_param._local_tensor.clone()
        torchs_own(self)

    monkeypatch.setattr(FSDPParam, "reset_sharded_param", pad_anew)
    expected = train(World(CPU), BatchPlan(**vars(SHARES["even"]) | {"workers": 1}), Tied)
    found = run_on_each_rank(3, lambda world: train(world, SHARES["even"], Tied, reload=reload))
    assert_alike(found[0]["state"], expected["state"])


def test_frozen_weights_and_late_blocks_where_unused_ones_are_looked_for() -> None:
    """One has no gradient to watch, and the other is not there to be watched before its first pass; then it rests."""
    one = BatchPlan(**vars(SHARES["idle"]) | {"workers": 1})
    expected = train(World(CPU), one, Late)
    found = run_on_each_rank(3, lambda world: train(world, SHARES["idle"], Late, finds_unused=True))
    assert_alike(found[0]["state"], expected["state"])


@pytest.mark.parametrize("share", ["uneven", "idle"])
def test_groups_that_replicate_each_other_do_what_one_worker_does(share: str) -> None:
    """Each holds its part within its group, and the others' gradients count too."""
    plan = BatchPlan(**vars(SHARES[share]) | {"workers": 4})
    expected = train(World(CPU), BatchPlan(**vars(plan) | {"workers": 1}), Tied)
    found, *others = run_on_each_rank(4, lambda world: train(world, plan, Tied, shard_size=2))
    assert_alike(found["state"], expected["state"])
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    assert all(other["norms"] == found["norms"] for other in others)
    assert [each["groups"] for each in (found, *others)] == [(2, 2)] * 4, "of workers, beside that of all of them"
    assert found["held"] + others[0]["held"] == others[1]["held"] + others[2]["held"] == expected["held"]


@pytest.mark.parametrize("size", [24, 22], ids=["even", "uneven"])
def test_reducing_in_each_pass_has_the_result_of_once(size: int) -> None:
    """With tied, frozen and unused weights, in groups, and with weights that are kept between the passes.

    SGD does not amplify the rounding of gradients near zero, as AdamW does.
    """
    cases: dict[str, Found] = {"plain": {}, "kept": {"keeps_weights": True}, "groups": {"shard_size": 2}}
    cases["unused"] = {"finds_unused": True}
    plan = BatchPlan(samples=size, micro_batch=2, global_batch=size, workers=4)  # three passes
    networks = {"unused": Late}

    def each(world: World) -> dict[str, Found]:
        return {
            name: train(world, plan, networks.get(name, Tied), "sgd", reduces_each_pass=True, **more)
            for name, more in cases.items()
        }

    found = run_on_each_rank(4, each)
    for name in cases:
        expected = train(World(CPU), BatchPlan(**vars(plan) | {"workers": 1}), networks.get(name, Tied), "sgd")
        assert_alike(found[0][name]["state"], expected["state"], name)
        assert found[0][name]["norms"] == pytest.approx(expected["norms"], rel=1e-9)


@pytest.mark.parametrize("each_pass", [False, True])
def test_no_whole_gradient_waits_between_passes_that_reduce(each_pass: bool) -> None:
    def count(world: World) -> list[int]:
        strategy = FSDP2(network(norm=False), world, reduces_each_pass=each_pass)
        strategy.warm_up(lambda: strategy.callable(samples(2)[0]).sum())
        counts = []
        for _ in range(2):  # the second step follows one that was not finished
            strategy.begin_step(3 * world.size)
            with strategy.accumulate(last=False):
                strategy.callable(samples(2)[0]).sum().backward()
            assert strategy.local_gradients() == [] if each_pass else len(strategy.local_gradients()) == 4
            held = [parameter for group in list_groups([strategy_model(strategy)]) for parameter in group.fsdp_params]
            gradients = [each.unsharded_accumulated_grad for each in held]
            gradients += [getattr(each, "_unsharded_param", each.sharded_param).grad for each in held]
            counts.append(sum(gradient.numel() for gradient in gradients if gradient is not None))
        return counts

    whole = sum(parameter.numel() for parameter in network(norm=False).parameters())
    assert run_on_each_rank(2, count) == [[0 if each_pass else whole] * 2] * 2


def test_momentum_that_was_there_before_sharding_is_divided_too() -> None:
    plan = SHARES["even"]
    expected = train(World(CPU), BatchPlan(**vars(plan) | {"workers": 1}), convolutions, "sgd")
    found = run_on_each_rank(3, lambda world: train(world, plan, convolutions, "sgd"))
    assert_alike(found[0]["state"], expected["state"])


def convolutions() -> nn.Module:
    """Kernels with channels last, as they are laid out for speed, and a matrix that lies column by column."""
    shape = nn.Unflatten(1, (1, 1, 5))
    last = nn.Linear(18, 3)
    last.weight = nn.Parameter(last.weight.detach().t().contiguous().t())
    layers = nn.Sequential(shape, nn.Conv2d(1, 4, (1, 2)), nn.Conv2d(4, 6, (1, 2)), nn.Flatten(), last)
    return layers.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def test_each_worker_holds_its_rows_only() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).double()

    whole = train(World(CPU), BatchPlan(**vars(SHARES["even"]) | {"workers": 1}), build)["held"]
    found = run_on_each_rank(4, lambda world: train(world, SHARES["even"], build))
    assert [each["groups"] for each in found] == [(4, 0)] * 4
    shares = [each["held"] for each in found]
    assert sum(shares) == whole
    assert max(shares) < 1.1 * whole / 4


def test_a_pass_without_backward_frees_what_it_gathered() -> None:
    def work(world: World) -> bool:
        model = network(norm=False)
        strategy = FSDP2(model, world)
        with torch.no_grad():
            strategy.callable(samples(2)[0])
        return all(isinstance(parameter, DTensor) for parameter in model.parameters())

    assert run_on_each_rank(2, work) == [True] * 2


def test_a_sharded_weight_on_which_an_operation_fails_is_named() -> None:
    """However it is given; not one that comes of it, nor one in a list."""

    def work(world: World) -> list[str]:
        model, inputs = network(norm=False), torch.ones(2, 5).double()
        FSDP2(model, world)
        names = {cast(DTensor, parameter): name for name, parameter in model.named_parameters()}
        weight = next(iter(names))
        passes = [
            lambda: linear(inputs, weight),
            lambda: linear(inputs, weight=weight),
            lambda: linear(inputs, weight.clone()),
            lambda: torch.cat([inputs, weight]),
            lambda: torch.ones(2) + torch.ones(3),
            lambda: torch.ones(2),
        ]
        return [find_direct_use(each, names) for each in passes]

    first = next(name for name, _ in network(norm=False).named_parameters())
    assert run_on_each_rank(2, work) == [[first, first, "", "", "", ""]] * 2


def test_gradients_are_taken_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """`to_local` is an operation of autograd, which a step has no need of."""
    calls: list[int] = []
    real = DTensor.to_local
    monkeypatch.setattr(DTensor, "to_local", lambda self, **more: calls.append(1) or real(self, **more))

    def work(world: World) -> tuple[int, bool]:
        strategy = FSDP2(network(norm=False), world)
        calls.clear()
        reduce_step(strategy, SHARES["even"], world.rank)
        return len(calls), all(row.grad is not None for row in strategy.local_parameters)

    assert run_on_each_rank(3, work) == [(0, True)] * 3


def test_a_state_is_scattered_as_it_was_gathered() -> None:
    def work(world: World) -> Any:
        model = Tied()
        strategy = FSDP2(model, world, blocks=find_blocks_to_wrap(model))
        optimizer = build_optimizer(model, OptimizerConfig(), moved=strategy.local_parameters)
        strategy.attach_optimizer(optimizer)
        reduce_step(strategy, SHARES["even"], world.rank)
        optimizer.step()
        live = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "task": {"seen": [1, None, "two"]}}
        whole = strategy.gather_state(live)
        sent = strategy.scatter_state(_double(whole))
        model.load_state_dict(sent["model"])
        optimizer.load_state_dict(sent["optimizer"])
        again = strategy.gather_state({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        return plain(whole), plain(again), sent["task"]

    (whole, again, task), *_ = run_on_each_rank(3, work)
    assert task == {"seen": [1, None, "two"]}
    for name, value in whole["model"].items():
        assert again["model"][name] == [2 * number for number in value], name
    moments = whole["optimizer"]["state"]
    assert {key: {"exp_avg": state["exp_avg"]} for key, state in again["optimizer"]["state"].items()} == {
        key: {"exp_avg": [2 * number for number in state["exp_avg"]]} for key, state in moments.items()
    }


def _double(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state * 2
    if isinstance(state, dict):
        return {key: _double(value) for key, value in state.items()}
    return state


class Tables(nn.Module):
    """Buffers of any shape, one of which has another name and a view."""

    table: Tensor
    turns: Tensor
    steps: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("table", torch.full((2, 3), value))
        self.register_buffer("turns", torch.polar(torch.full((1, 2, 3), value), torch.ones(1, 2, 3)))
        self.register_buffer("steps", torch.tensor(int(value)))
        self.again, self.row = self.table, self.table[1]


def test_buffers_keep_their_other_names_and_their_views_and_are_no_ones_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, real = [], ModelSharder._receive
    monkeypatch.setattr(ModelSharder, "_receive", lambda *given: sent.append(1) or real(*given))

    def shard(world: World) -> Any:
        model = Tables(1.0 + world.rank)
        whole = nn.Sequential(model)
        average = EMAModel(whole, 0.9)
        FSDP2(whole, world, average.module, blocks=["0"])
        numbers = [float(value.real) for value in (model.table[0, 0], model.row[0], model.turns[0, 0, 0], model.steps)]
        model.table += 1
        model.turns *= 2
        copy = cast(Any, average.module)[0]
        return len(sent), model.again is model.table, *numbers, copy.again.tolist(), float(copy.turns.abs().mean())

    expected = (5, True, 1.0, 1.0, pytest.approx(0.5403, abs=1e-4), 1.0, [[1.0] * 3] * 2, pytest.approx(1.0))
    assert run_on_each_rank(2, shard) == [expected] * 2


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 3), Scaled()), "1.scale is a parameter without dimensions"),
        (lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3).double()), "torch.float32, torch.float64"),
    ],
)
def test_weights_that_cannot_be_divided_are_named(build: Callable[[], nn.Module], named: str) -> None:
    model = build()
    with pytest.raises(RequestError, match=named):
        FSDP2(model, World(CPU))


def test_a_worker_that_runs_fewer_blocks_is_told_as_the_others_are() -> None:
    def work(world: World) -> None:
        strategy, inputs = FSDP2(Pair(), world, blocks=["always", "sometimes"]), torch.ones(2, 3).double()
        strategy.warm_up(lambda: strategy.callable(inputs, whole=True).sum())
        with pytest.raises(TrainingError, match="ran different blocks of the model"):
            strategy.callable(inputs, whole=world.is_main)
        for save in (strategy.gather_state, strategy.sharded_state_dict):
            with pytest.raises(TrainingError, match="ran different blocks of the model"):
                save({})

    run_on_each_rank(2, work)


def test_an_optimizer_that_needs_whole_weights_is_refused() -> None:
    def shard(world: World) -> str:
        model = nn.Linear(5, 3)
        strategy = FSDP2(model, world)
        with pytest.raises(RequestError) as refused:
            strategy.attach_optimizer(torch.optim.Adafactor(strategy.local_parameters))
        return refused.value.problem

    assert all("Adafactor needs all of them" in problem for problem in run_on_each_rank(2, shard))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
