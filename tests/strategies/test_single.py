import pytest
import torch
from torch.nn.functional import cross_entropy

from multigpu_cli.capabilities import STRATEGIES
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.strategies.base import Single, find_strategy
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


def test_a_strategy_whose_room_is_gone_is_refused_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_strategy("auto") is find_strategy("none") is Single
    monkeypatch.delitem(STRATEGIES, "fsdp")
    for exact in (False, True):
        with pytest.raises(RequestError, match="--multi-gpu fsdp: it is not part of this installation"):
            find_strategy("fsdp", exact=exact)
