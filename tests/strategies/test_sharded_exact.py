"""Sharded and exact, in groups of processes: the bits of the definition, and of one worker."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.eval_weights import EMAModel
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.strategies.base import Single, Strategy
from multigpu_cli.strategies.fsdp.exact import ExactFSDP2, WeightLayouts, _divide
from tests.strategies.test_exact import Vector, by_definition, leaf
from tests.strategies.test_sharded import SHARES, convolutions, train
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE

COUNTS = (1, 2, 5, 7, 8, 13)


class Recalled(nn.Module):
    """A weight in a module that is called twice in a pass, or not at all; the first call's gradient comes last.

    Its activations are recomputed, which is no call.
    """

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.beside = Vector(5), nn.Parameter(torch.zeros(1))
        self.register_buffer("passes", torch.zeros(()))
        self.calls = 2

    def forward(self, leaf: Tensor) -> Tensor:
        found = self.beside.sum() * 0
        self.passes += 1
        for _ in range(self.calls):
            found = checkpoint(self.inner, leaf / 2 + found * 0, use_reentrant=False) + found
        return found


def shard(model: nn.Module, world: World, *blocks: str) -> ExactFSDP2:
    strategy = ExactFSDP2(model, world, blocks=blocks)
    strategy.warm_up(lambda: model(torch.ones(5)))
    return strategy


def take_gradient(strategy: Strategy, model: nn.Module, count: int, world: World) -> bytes:
    """This worker's rows of the sum over a step of `count` leaves, of the model's last parameter."""
    mine = range(world.rank, count, world.size)
    strategy.begin_step(count)
    for position, number in enumerate(mine):
        with strategy.accumulate(last=position == len(mine) - 1):
            strategy.callable(leaf(count, number)).backward()
        strategy.after_backward(number)
    strategy.reduce_gradients(idle=not mine)
    gradient = strategy.local_parameters[-1].grad
    assert gradient is not None
    return gradient.numpy().tobytes()


@pytest.mark.parametrize("workers", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 5, 7))])
def test_the_rows_have_the_bits_of_the_definition(workers: int) -> None:
    """Any number of leaves: more and fewer than workers, a power of two or not."""

    def every_count(world: World) -> tuple[list[bytes], float]:
        model = Vector(5)
        strategy = shard(model, world)
        rows = [take_gradient(strategy, model, count, world) for count in COUNTS]
        return rows, float(strategy.total_norm(torch.zeros(())))

    found, norms = zip(*run_on_each_rank(workers, every_count), strict=True)
    assert [b"".join(rows) for rows in zip(*found, strict=True)] == [by_definition(count) for count in COUNTS]
    whole = torch.frombuffer(bytearray(by_definition(COUNTS[-1])), dtype=torch.float32)
    assert set(norms) == {float(whole.norm())}, "where there are fewer gradients than workers"


def test_a_module_that_is_called_twice_is_one_leaf_and_one_that_is_not_called_is_zeros() -> None:
    def work(world: World) -> list[bytes]:
        model = Recalled()
        strategy = shard(model, world, "inner")
        found = [take_gradient(strategy, model, count, world) for count in (7, 8)]
        strategy.begin_step(3)  # one that is not finished leaves nothing behind
        with strategy.accumulate(last=True):
            model(leaf(9, world.rank)).backward()
            assert not [rows for rows in strategy._sums if rows._leaves_at_hand is not None], "sums wait for no module"
        strategy.after_backward(world.rank)
        found.append(take_gradient(strategy, model, 5, world))
        model.calls = 0
        found.append(take_gradient(strategy, model, 4, world))
        assert float(model.passes) == 1 + 4, "by the mean change of a micro-batch in each step, and before the first"
        return found

    *found, nothing = (b"".join(rows) for rows in zip(*run_on_each_rank(3, work), strict=True))
    assert found == [by_definition(count) for count in (7, 8, 5)]
    assert nothing == bytes(20)


@pytest.mark.parametrize("share", ["uneven", pytest.param("idle", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_norms_and_state_have_the_bits_of_one_worker(share: str, name: str) -> None:
    """Norms clip; kernels with channels last, BatchNorm, an average and moments."""
    plan = replace(SHARES[share], interleaved=True)
    expected = train(ALONE, replace(plan, workers=1), normed_convolutions, name, exact=True)
    found = run_on_each_rank(3, lambda world: train(world, plan, normed_convolutions, name, exact=True))
    assert (found[0]["norms"], found[0]["state"]) == (expected["norms"], expected["state"])


def normed_convolutions() -> nn.Module:
    shape, layers = nn.Unflatten(1, (1, 1, 5)), (nn.Conv2d(1, 5, (1, 2)), nn.BatchNorm2d(5), nn.Conv2d(5, 7, (1, 2)))
    model = nn.Sequential(shape, *layers, nn.Flatten(), nn.Linear(21, 3))
    return model.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("shape", "workers", "parts"),
    [((5, 2, 3), 4, [12, 12, 6, 0]), ((7,), 3, [3, 3, 1]), ((6, 4), 3, [8, 8, 8]), ((1, 2), 2, [2, 0])],
)
def test_weights_are_divided_as_torch_does(shape: tuple[int, ...], workers: int, parts: list[int]) -> None:
    chunks = [chunk.numel() for chunk in torch.empty(shape).chunk(workers)]
    assert _divide(shape, workers) == parts == chunks + [0] * (workers - len(chunks))


def test_a_module_finds_its_weights_in_their_layout_while_it_runs() -> None:
    """By any of their names; nothing is left of a pass, also of one that failed."""
    layers = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(2, 3, 2))
    layers[1].weight = layers[0].weight
    layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layouts, strides = WeightLayouts(layers), (8, 1, 4, 2)
    assert layouts.unusual == {"0.weight": strides, "1.weight": strides}
    weight: Any = layers[0].weight
    weight.data = weight.detach().contiguous()
    layouts.restore_in_forward()
    seen = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, _: seen.append((layer.weight.stride(), layer.weight.tolist())))
        layer(torch.ones(1, 2, 2, 2)).sum().backward()
        with pytest.raises(RuntimeError):
            layer(torch.ones(1))
        assert layer.weight is weight
    assert seen == [(strides, weight.tolist())] * 4
    assert weight.grad is not None
    assert float(weight.grad.sum()) == 2 * weight.numel()


class Squared(nn.Linear):
    """Its weight is used twice."""

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(inputs), self.weight).square().sum()


def test_casts_and_layouts_are_those_without_sharding() -> None:
    """The gradient of a weight that is used twice is rounded once, in its cast; an average has its layout, too."""

    def work(world: World) -> tuple[list[bytes], list[tuple[int, ...]]]:
        found, seen = list[bytes](), list[tuple[int, ...]]()
        for kind in (Single, ExactFSDP2):
            torch.manual_seed(1)
            model, precision = Squared(5, 5), Precision("bf16", torch.device("cpu"))
            strategy = kind(model, world)
            assert strategy.keeps_casts, "the cast weight's gradient is summed before it is rounded"
            strategy.callable = cast(Any, precision.autocast())(model)
            found.append(take_gradient(strategy, model, 1, world))
        layers = normed_convolutions()
        average = EMAModel(layers, 0.9).module
        ExactFSDP2(layers, world, average)
        for network in (layers, average):
            kernel = network.get_submodule("3")
            kernel.register_forward_pre_hook(lambda kernel, _: seen.append(kernel.weight.stride()))
            network(torch.ones(2, 5).double())
        return found, seen

    (found, seen), *_ = run_on_each_rank(1, work)
    assert found[0] == found[1]
    assert seen == [(10, 1, 10, 5)] * 2


def test_a_weight_that_lies_column_by_column_is_refused() -> None:
    model = convolutions()
    with pytest.raises(RequestError, match=r"4\.weight is not stored row by row"):
        ExactFSDP2(model, ALONE)
