from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from multigpu_cli.capabilities import STRATEGIES
from multigpu_cli.checkpoint.snapshot import Snapshot, TrainState
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.strategies.base import DataParallel, Single, Strategy, choose_strategy, find_strategy
from tests.strategies.one_step import network, reduce_step, samples, state


@pytest.mark.parametrize("micro_batch", [32, 16, 7, 1])
def test_the_gradient_is_that_of_the_whole_batch_however_it_is_cut(micro_batch: int) -> None:
    model, whole = network(norm=False), network(norm=False)
    reduce_step(Single(model), BatchPlan(samples=32, micro_batch=micro_batch, global_batch=32, workers=1), 0)
    inputs, targets = samples(32)
    cross_entropy(whole(inputs), targets).backward()
    for name, value in state(model).items():
        assert value == pytest.approx(state(whole)[name], abs=1e-14), name


def test_a_short_last_batch_is_divided_by_its_own_size() -> None:
    model, whole = network(norm=False), network(norm=False)
    plan = BatchPlan(samples=42, micro_batch=8, global_batch=32, workers=1)
    reduce_step(Single(model), plan, 0, step=1)
    inputs, targets = samples(42)
    cross_entropy(whole(inputs[32:]), targets[32:]).backward()
    assert state(model)["0.weight.grad"] == pytest.approx(state(whole)["0.weight.grad"], abs=1e-14)


def test_one_micro_batch_moves_batchnorm_as_torch_does() -> None:
    """To the last bit, also where the start and the change do not add up to torch's value, as from the second step."""
    model, plain = network(), network()
    strategy, plan = Single(model), BatchPlan(samples=16, micro_batch=4, global_batch=4, workers=1)
    for step, inputs in enumerate(samples(16)[0].split(4)):
        reduce_step(strategy, plan, 0, step)
        plain(inputs)
        for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(buffer, expected), (step, name)


def test_it_is_one_lane_without_any_averaging() -> None:
    strategy = Single(network())
    assert (strategy.name, strategy.replicas_per_process, strategy.loss_factor) == ("single", 1, 1.0)
    assert (strategy.reduces_first, strategy.sharded, strategy.num_shards, strategy.min_workers) == (False, False, 1, 1)
    assert (strategy.keeps_casts, strategy.cudnn_benchmark, strategy.interleaved) == (True, True, False)
    assert not DataParallel.cudnn_benchmark, "each pass has new threads"


def test_its_state_and_its_gradients_are_the_whole() -> None:
    def read(name: str, outline: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
        assert (name, begin, end) == ("model.b", 0, None)
        return torch.full_like(outline, 2.0, device="cpu")

    strategy, whole = Single(network()), {"model": {"a": torch.ones(2), "b": torch.ones(3, device="meta")}}
    assert strategy.gather_state(whole) is whole
    assert strategy.sharded_state_dict(whole) == (whole, {})
    found = strategy.load_sharded(whole, read)
    assert [value.tolist() for value in found["model"].values()] == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    assert strategy.local_gradients() == []
    first = strategy.local_parameters[0]
    first.grad = torch.ones_like(first)
    assert [gradient is first.grad for gradient in strategy.local_gradients()] == [True], "the others have none yet"


def test_a_skipped_step_leaves_no_statistics() -> None:
    model = network()
    strategy, buffer = Single(model), next(model.buffers())
    strategy.begin_step(1)
    buffer.fill_(torch.nan)
    strategy.rollback_buffers(torch.tensor(1.0))
    assert not buffer.isnan().any()


def test_rank_0_alone_captures_and_each_copy_takes_the_memory_of_the_last() -> None:
    seen: list[Any] = []

    def begin_capture(into: object, held: dict[str, Any]) -> Snapshot:
        seen.append(into)
        return Snapshot({"copied": held})

    state = cast(TrainState, SimpleNamespace(begin_capture=begin_capture))
    for world in (World(torch.device("cpu"), rank=1, size=2), World(torch.device("cpu"))):
        saver = Strategy(network(), world).create_saver(*cast(tuple[Any, Any], (None, None)))
        found = [saver.capture(state, {"step": step}, step) for step in (1, 2)]
    first, second = ({"copied": {"step": step}} for step in (1, 2))
    assert ([each and each.state for each in found], seen) == ([first, second], [None, first])


@pytest.mark.parametrize(
    ("name", "to_launch", "workers", "taken"),
    [
        ("ddp", 2, 1, "single"),
        ("ddp", 0, 2, "ddp"),
        ("ddp", 0, 1, "ddp"),
        ("fsdp", 0, 1, "single"),
        ("fsdp", 0, 2, "fsdp"),
    ],
)
def test_a_process_without_the_others_trains_as_one(name: str, to_launch: int, workers: int, taken: str) -> None:
    placement, world = Placement(name, (), to_launch, "a test"), World(torch.device("cpu"), size=workers)
    assert choose_strategy(placement, world, exact=False).name == taken


def test_a_strategy_whose_room_is_gone_is_refused_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_strategy("auto") is find_strategy("none") is Single
    monkeypatch.delitem(STRATEGIES, "fsdp")
    for exact in (False, True):
        with pytest.raises(RequestError, match="--multi-gpu fsdp: it is not part of this installation"):
            find_strategy("fsdp", exact=exact)
