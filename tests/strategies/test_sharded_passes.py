"""What FSDP2 takes from the settings, what it asks of torch in each pass, and how it tells that workers differ."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.eval_weights import EMAModel
from multigpu_cli.runtime.compile import CompiledModel
from multigpu_cli.strategies.base import Setup
from multigpu_cli.strategies.fsdp import fsdp, probe
from multigpu_cli.strategies.fsdp.fsdp import FSDP2
from multigpu_cli.strategies.fsdp.state import GatheringSaver, RowSaver
from tests.strategies.one_step import network, samples
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE

FLAGS: dict[str, Any] = {"multi_gpu": "fsdp", "reshard": "step", "shard_size": 2, "find_unused_parameters": True}


class Given(FSDP2):
    """Keeps what it was made of, and divides nothing."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        self.given, self._world = (parts, named), ALONE


@pytest.mark.parametrize(
    ("wanted", "found", "given", "device", "expected"),
    [
        ("auto", "bf16", False, "cuda", {"strategy.param_dtype": "bf16"}),
        ("auto", "fp32", False, "cuda", {"strategy.param_dtype": "fp32"}),
        ("fp32", "bf16", True, "cuda", {}),
        ("bf16", "bf16", True, "cuda", {}),
        ("bf16", "fp32", True, "cpu", None),
        ("bf16", "fp32", False, "cuda", None),
        ("bf16", "fp32", False, "cpu", {"strategy.param_dtype": "fp32"}),  # of a run that was begun on GPUs
    ],
)
def test_a_format_that_does_not_go_with_the_run_is_refused(
    wanted: str, found: str, given: bool, device: str, expected: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "choose_param_dtype", lambda *_: found)
    explicit = {"strategy.param_dtype"} if given else set()
    config = cast(Any, SimpleNamespace(communication=SimpleNamespace(param_dtype=wanted), explicit=explicit))
    world = World(torch.device(device))
    if expected is not None:
        assert FSDP2.measure_settings(nn.Linear(2, 2), config, world) == expected
        return
    with pytest.raises(RequestError, match=r"strategy\.param_dtype bf16: it needs GPUs"):
        FSDP2.measure_settings(nn.Linear(2, 2), config, world)


def test_the_settings_of_a_run_are_those_of_its_strategy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    average, compiled = EMAModel(model, 0.9), CompiledModel(model, None, backend="eager")
    config = resolve(FLAGS, ["strategy.param_dtype=bf16", "strategy.wrap=1", "strategy.reduce=pass"], None)
    strategy = Given.create(compiled, Setup(ALONE, cast(Any, None), config, average, 1, {}))
    settings = {
        "average": average.module, "blocks": ["1"], "keeps_weights": True, "source": 1, "shard_size": 2,
        "finds_unused": True, "param_dtype": torch.bfloat16, "reduces_each_pass": True,
    }  # fmt: skip
    assert (cast(Given, strategy).given, strategy.callable) == (((model, ALONE), settings), compiled)
    plain = Given.create(model, Setup(ALONE, cast(Any, None), resolve({}, ["strategy.wrap=1"], None), None, 0, {}))
    settings |= {"average": None, "keeps_weights": False, "source": 0, "shard_size": None, "finds_unused": False}
    settings |= {"param_dtype": None, "reduces_each_pass": False}
    assert cast(Given, plain).given == ((model, ALONE), settings)
    assert FSDP2.describe(model, config, 4) == {
        "sharding": "by 1 block (Linear: 1) and the rest within groups of 2 workers; weights are gathered in bf16, "
        "and freed after the step; gradients are reduced in each pass"
    }
    assert " within " not in FSDP2.describe(model, config, 2)["sharding"]
    assert FSDP2.describe(model, config, 1) == {"sharding": "none: one process holds everything"}


def test_workers_that_see_one_folder_write_their_rows_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = SimpleNamespace(folder=Path("run/checkpoints"))
    owners = {Path("run"): "this run"}
    monkeypatch.setattr(fsdp, "agree_on_owner", lambda world, folder: owners.get(folder, ""))
    saver = Given().create_saver(store, cast(Any, None))
    assert (type(saver), saver.note, cast(Any, saver)._owner) == (RowSaver, "", "this run")
    owners.clear()
    saver = Given().create_saver(store, cast(Any, None))
    note = "not all workers see run: worker 0 gathers what the checkpoints hold, and writes them alone"
    assert (type(saver), saver.note) == (GatheringSaver, note)


@pytest.mark.parametrize("order", [*range(2**16 - 20, 2**16 + 20), 3**16 - 1, -1])
def test_a_thousand_workers_that_ran_the_same_blocks_have_a_norm(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks of what they ran are compared by sums in float64, which must not be rounded."""
    strategy = Given()
    strategy._order, strategy._world = order, World(torch.device("cpu"), 0, 1000)
    strategy._state = cast(Any, SimpleNamespace(replicas=250))
    monkeypatch.setattr(fsdp, "all_reduce_sum", lambda world, sent: sent * world.size)
    assert float(strategy.total_norm(torch.tensor(3.0))) == 6.0
    monkeypatch.setattr(fsdp, "all_reduce_sum", lambda world, sent: sent * world.size + torch.tensor([0.0, 1.0, 1.0]))
    assert strategy.total_norm(torch.tensor(3.0)).isnan(), "another ran something else"


def test_sums_are_completed_in_groups_that_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(sums: Tensor | None, *, learns: bool = True) -> Any:
        weight = nn.Parameter(torch.ones(2), requires_grad=learns)
        return SimpleNamespace(
            unsharded_accumulated_grad=sums, sharded_param=weight, _orig_size=(2, 3), reduce_dtype=torch.float32
        )

    held = torch.ones(2, 3)
    groups = [[hold(held), hold(None), hold(None, learns=False)], [hold(None), hold(None)]]
    monkeypatch.setattr(probe, "list_groups", lambda roots: [SimpleNamespace(fsdp_params=group) for group in groups])
    strategy = Given()
    strategy._roots = [nn.Linear(1, 1)]
    strategy._complete_sums()
    (kept, made, frozen), untouched = [[each.unsharded_accumulated_grad for each in group] for group in groups]
    assert kept is held
    assert (made.tolist(), made.dtype) == ([[0.0] * 3] * 2, torch.float32)
    assert [frozen, *untouched] == [None] * 3


def test_each_pass_asks_torch_for_what_its_place_in_the_step_needs() -> None:
    run_on_each_rank(1, follow_passes)


def are_sharded(model: nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def record_flags(model: nn.Module, calls: list[tuple[str, bool]]) -> None:
    """Append each flag that FSDP is given, with its name, to the calls."""
    for name in ("requires_gradient_sync", "reshard_after_backward", "requires_all_reduce"):
        real = getattr(model, f"set_{name}")
        setattr(model, f"set_{name}", lambda on, name=name, real=real: calls.append((name, on)) or real(on))


def unfreeze_bias(model: nn.Module, strategy: FSDP2) -> None:
    """Train the first bias from now on, as --freeze with an end does, and check that its rows are reduced too."""
    model.get_submodule("0")._parameters["bias"].requires_grad_(True)  # type: ignore[union-attr]
    for parameter in strategy._parts.values():
        parameter.requires_grad_(True)
    assert strategy.follow_trained(lambda: strategy) is strategy
    assert are_sharded(model)
    assert [row.shape for row in strategy.local_parameters] == [(8, 5), (8,), (3, 8), (3,)]


def probe_twice(
    strategy: FSDP2, run_pass: Callable[[], None], calls: list[tuple[str, bool]], passes: list[list[tuple[str, bool]]]
) -> None:
    """Probe the memory with two passes, without accumulation and with it, and compare the flags set in each pass."""
    trial, (inside, last) = [("requires_all_reduce", False)], passes
    for flags, expected in (({}, trial * 2), ({"accumulates": True}, [*inside, *trial, *last, *trial])):
        calls.clear()
        strategy.probe_memory(lambda: (run_pass(), run_pass())[0], **flags)
        assert calls == expected
    calls.clear()
    run_pass()
    assert calls == [], "a trial leaves nothing behind"


def follow_passes(world: World) -> None:
    model, (inputs, _) = network(norm=False), samples(2)
    model.get_submodule("0").bias.requires_grad_(False)
    strategy = FSDP2(model, world, keeps_weights=True, finds_unused=True)
    asked, counted, waits = list[tuple[str, bool]](), list[bool](), list[int]()
    strategy.on_gather = lambda: waits.append(1)
    strategy._complete_sums = lambda: asked.append(("complete_sums", True))  # type: ignore[method-assign]
    record_flags(model, asked)
    inside = [("requires_gradient_sync", False), ("reshard_after_backward", False)]
    last = [("requires_gradient_sync", True), ("reshard_after_backward", True)]

    def loss() -> Tensor:
        counted.append(cast(Any, strategy._usage).counts)
        return strategy.callable(inputs).sum()

    def run_pass() -> None:
        with strategy.accumulate(last=False):
            loss().backward()

    strategy.warm_up(loss)
    assert are_sharded(model)
    run_pass()  # outside of a step each is by itself
    assert (asked, counted, len(waits)) == ([], [False] * 2, 4)
    model.zero_grad()

    strategy.begin_step(3)
    run_pass()
    assert [gradient.shape for gradient in strategy.local_gradients()] == [(8, 5), (3, 8), (3,)]
    strategy.reduce_gradients(idle=False)
    assert asked == inside + last
    assert counted[2:] == [True, False, False], "what padding passes use is not counted"
    assert strategy.find_parameter(strategy.local_parameters[0]) is model.get_parameter("0.weight")

    probe_twice(strategy, run_pass, asked, [inside, last])
    with patch.object(probe, "can_probe", lambda: False):
        strategy.probe_memory(run_pass)
    assert len(waits) == 2 * len(counted) == 2 * 11

    with torch.no_grad():
        loss()
    assert not are_sharded(model), "as after an evaluation"
    unfreeze_bias(model, strategy)
    del FSDPModule.set_reduce_scatter_unused_params  # as in torch 2.8
    strategy.warm_up(loss)
