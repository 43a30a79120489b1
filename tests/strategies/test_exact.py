"""Exact in groups of processes: gradients and buffers have the bits of one worker's, and of the definition."""

from collections.abc import Callable
from hashlib import sha256

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.config.schema import CommunicationConfig
from multigpu_cli.distributed.world import World
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.strategies.base import Single, Strategy
from multigpu_cli.strategies.ddp import DDP
from multigpu_cli.strategies.exact import ExactReduction, ReductionTree
from tests.strategies.one_step import network, reduce_step, state
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE

LEAVES = range(1, 18)


class Vector(nn.Module):
    """Its gradient is whatever it is multiplied with."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, leaf: Tensor) -> Tensor:
        return (self.weight * leaf).sum()


def leaf(count: int, number: int, size: int = 5) -> Tensor:
    """Numbers of all sizes, whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(100 * count + number)
    exponents = torch.randint(-12, 12, (size,), generator=generator)
    return torch.ldexp(torch.randn(size, generator=generator), exponents)


def gradient(strategy: Strategy, model: Vector, count: int, world: World) -> bytes:
    """The reduced gradient of a step of `count` leaves."""
    mine = range(count * world.rank // world.size, count * (world.rank + 1) // world.size)
    strategy.begin_step(count)
    for position, number in enumerate(mine):
        with strategy.accumulate(last=position == len(mine) - 1):
            (strategy.callable(leaf(count, number)) * strategy.loss_factor).backward()
        strategy.after_backward(number)
    strategy.reduce_gradients(idle=not mine)
    assert model.weight.grad is not None
    found = model.weight.grad.view(torch.uint8).numpy().tobytes()
    model.weight.grad = None
    return found


def every_count(world: World) -> list[bytes]:
    """The gradient of each count; a power of two of workers with one node each sends the fewest bytes, in pairs."""
    model, found, in_pieces = Vector(5), list[bytes](), set[int]()
    strategy = ExactReduction(model, world)
    real = strategy._by_pieces
    for count in LEAVES:
        strategy._by_pieces = lambda *given, count=count: in_pieces.add(count) or real(*given)  # type: ignore[method-assign]
        found.append(gradient(strategy, model, count, world))
    in_pairs = {world.size << level for level in range(4)} if world.size.bit_count() == 1 else set()
    assert in_pieces == (set(LEAVES) - in_pairs if world.size > 1 else set())
    return found


def by_definition(count: int) -> bytes:
    tree: ReductionTree[Tensor] = ReductionTree(lambda left, right: left + right)
    for number in range(count):
        tree.push(0, number, leaf(count, number))
    return tree.total().numpy().tobytes()


@pytest.mark.parametrize("workers", [3, 4, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5, 7))])
def test_the_gradient_has_the_bits_of_the_definition_on_every_rank(workers: int) -> None:
    """Any number of leaves: more and fewer than workers, a power of two or not."""
    expected = [by_definition(count) for count in LEAVES]
    assert every_count(ALONE) == expected
    for rank, found in enumerate(run_on_each_rank(workers, every_count)):
        assert found == expected, f"rank {rank}"


def test_ddp_has_other_bits() -> None:
    """The control: or the test above could not fail."""

    def ordinary(world: World) -> list[bytes]:
        model = Vector(5)
        strategy = DDP(model, world, CommunicationConfig())
        return [gradient(strategy, model, count, world) for count in range(8, 18)]

    expected = [by_definition(count) for count in range(8, 18)]
    found = run_on_each_rank(3, ordinary)[0]
    assert sum(one != other for one, other in zip(found, expected, strict=True)) > 5


def steps(plan: BatchPlan, kind: Callable[[nn.Module, World], Strategy]) -> Callable[[World], str]:
    """A few steps of a network with BatchNorm; the bits of weights, buffers and last gradient."""

    def work(world: World) -> str:
        model = network(dtype=torch.float32)
        strategy = kind(model, world)
        whole = BatchPlan(
            samples=plan.samples, micro_batch=plan.micro_batch, global_batch=plan.global_batch, workers=world.size
        )
        for _ in range(3):
            reduce_step(strategy, whole, world.rank)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        return sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()

    return work


SHARES = {
    "even": BatchPlan(samples=24, micro_batch=3, global_batch=24, workers=1),
    "uneven": BatchPlan(samples=20, micro_batch=3, global_batch=20, workers=1),  # 7 leaves, the last one short
    "idle": BatchPlan(samples=6, micro_batch=3, global_batch=6, workers=1),  # idle workers
    "one": BatchPlan(samples=3, micro_batch=3, global_batch=3, workers=1),  # one micro-batch, and all others idle
}


def each_share(world: World) -> dict[str, str]:
    return {name: steps(plan, ExactReduction)(world) for name, plan in SHARES.items()}


@pytest.mark.parametrize("workers", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 8))])
def test_buffers_have_the_bits_of_one_worker_too(workers: int) -> None:
    assert run_on_each_rank(workers, each_share) == [each_share(ALONE)] * workers


def test_it_is_the_gradient_of_the_global_batch() -> None:
    """Not only alike everywhere, but right, and buffers are; `Single` is tested by itself."""
    plan = BatchPlan(samples=20, micro_batch=3, global_batch=20, workers=1)
    model, plain = network(), network()
    exact, single = ExactReduction(model, ALONE), Single(plain)
    for _ in range(2):
        for strategy in (exact, single):
            reduce_step(strategy, plan, 0)
        for name, value in state(plain).items():
            assert state(model)[name] == pytest.approx(value, rel=1e-12, abs=1e-14), name
        model.zero_grad()
        plain.zero_grad()


def test_a_parameter_without_gradient_counts_as_zeros_everywhere() -> None:
    class Branch(Vector):
        def __init__(self) -> None:
            super().__init__(5)
            self.unused = nn.Parameter(torch.ones(2))

    def work(world: World) -> list[float]:
        model = Branch()
        gradient(ExactReduction(model, world), model, 4, world)
        assert model.unused.grad is not None
        return model.unused.grad.tolist()

    assert work(ALONE) == [0.0, 0.0]
    assert run_on_each_rank(3, work) == [[0.0, 0.0]] * 3


def test_nothing_of_an_abandoned_step_is_left() -> None:
    """As after an out-of-memory in its second micro-batch, whose forward pass has changed the buffers."""
    model = Counting(torch.float32, torch.float32)
    before = [buffer.clone() for buffer in model.buffers()]
    strategy = ExactReduction(model, ALONE)
    strategy.begin_step(3)
    strategy.callable(leaf(3, 0)).backward()
    strategy.after_backward(0)
    strategy.callable(leaf(3, 1))
    strategy.abort_step()
    assert all(map(torch.equal, model.buffers(), before))
    assert gradient(strategy, model, 7, ALONE) == by_definition(7)


def test_a_nan_reaches_every_rank() -> None:
    def work(world: World) -> list[bool]:
        model = Vector(3)
        strategy = ExactReduction(model, world)
        strategy.begin_step(world.size)
        value = torch.full((3,), torch.nan if world.rank == 1 else 1.0)
        strategy.callable(value).backward()
        strategy.after_backward(world.rank)
        strategy.reduce_gradients(idle=False)
        assert model.weight.grad is not None
        return model.weight.grad.isnan().tolist()

    assert run_on_each_rank(4, work) == [[True] * 3] * 4


FLOATING = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KINDS = [*FLOATING, torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool]


class Counting(Vector):
    """A weight of one type, and buffers of another: a table of some size, and a single number."""

    def __init__(self, weight: torch.dtype, buffer: torch.dtype) -> None:
        super().__init__(5)
        self.to(weight)
        self.register_buffer("seen", torch.tensor([1, 0, 1, 1, 0, 1, 1]).to(buffer))
        self.register_buffer("last", torch.tensor(1).to(buffer))

    def forward(self, leaf: Tensor) -> Tensor:
        for buffer in self.buffers():
            if buffer.is_floating_point() or buffer.is_complex():
                buffer.mul_(0.9).add_(leaf.sum().to(buffer.dtype))
            elif buffer.dtype == torch.bool:
                buffer.logical_and_(leaf[0] > 0)
            else:
                buffer.add_(leaf[0].abs().long().clamp(max=9).to(buffer.dtype))
        return super().forward(leaf.to(self.weight.dtype))


def each_kind(world: World) -> dict[str, bytes]:
    """The bits after a step of 8 leaves, which pair up, and one of 7, which do not, for each pair of types."""
    found = {}
    for weight in FLOATING:
        for buffer in KINDS:
            model = Counting(weight, buffer)
            strategy = ExactReduction(model, world)
            gradients = [gradient(strategy, model, count, world) for count in (8, 7)]
            state = [value.flatten().view(torch.uint8).numpy().tobytes() for value in model.buffers()]
            found[f"{weight} with {buffer}"] = b"".join(gradients + state)
    return found


@pytest.mark.parametrize("workers", [3, 4, pytest.param(2, marks=pytest.mark.slow)])
def test_every_type_of_weight_and_buffer_has_the_bits_of_one_worker(workers: int) -> None:
    expected = each_kind(ALONE)
    assert len(expected) == len(FLOATING) * len(KINDS)
    for found in run_on_each_rank(workers, each_kind):
        assert [pair for pair in expected if found[pair] != expected[pair]] == []


def test_a_model_in_two_formats() -> None:
    """Each is added up in its own."""

    class Both(Vector):
        def __init__(self) -> None:
            super().__init__(5)
            self.narrow = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))

        def forward(self, leaf: Tensor) -> Tensor:
            return super().forward(leaf) + (self.narrow * leaf.bfloat16()).sum().float()

    def work(world: World) -> list[bytes]:
        model, found = Both(), []
        strategy = ExactReduction(model, world)
        for count in (8, 7):
            found.append(gradient(strategy, model, count, world))
            assert model.narrow.grad is not None
            found.append(model.narrow.grad.view(torch.uint8).numpy().tobytes())
            model.narrow.grad = None
        return found

    expected = work(ALONE)
    assert run_on_each_rank(4, work) == [expected] * 4
