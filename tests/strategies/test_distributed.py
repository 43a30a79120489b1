import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from multigpu_cli.config.schema import CommunicationConfig, OptimizerConfig
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.faults.replica_check import check_replicas
from multigpu_cli.models.build import use_channels_last
from multigpu_cli.models.networks.convnet import ConvNet
from multigpu_cli.optimizers.build import build_optimizer, set_rate
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.runtime.compile import CompiledModel
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.strategies.base import Single, Strategy
from multigpu_cli.strategies.ddp import DDP, Replica
from multigpu_cli.strategies.exact import ExactReduction
from tests.strategies.one_step import network, reduce_step, samples, state
from tests.support.ranks import run_on_each_rank

SHARES = {
    "even": BatchPlan(samples=24, micro_batch=4, global_batch=24, workers=3),
    "uneven": BatchPlan(samples=23, micro_batch=3, global_batch=23, workers=3),  # 2, 3 and 3 micro-batches, one short
    "idle": BatchPlan(samples=6, micro_batch=3, global_batch=6, workers=3),
    "one works": BatchPlan(samples=4, micro_batch=4, global_batch=4, workers=3),
}


def steps(
    plan: BatchPlan, *, norm: bool, count: int = 3, **communication: Any
) -> Callable[[World], list[dict[str, list[float]]]]:
    """The reduced state after each of a few steps; gradients are dropped in between, as the engine does."""

    def work(world: World) -> list[dict[str, list[float]]]:
        model = network(norm=norm)
        config = CommunicationConfig(**communication)
        strategy = DDP(model, world, config) if world.size > 1 else Single(model)
        found = []
        if isinstance(strategy, DDP) and world.size > 2 and not norm:
            seen: list[torch.Tensor] = []

            def loss() -> torch.Tensor:
                total: torch.Tensor = strategy.callable(samples(2)[0]).sum()
                total.register_hook(seen.append)
                return total

            strategy.warm_up(loss)
            assert (seen, {parameter.grad for parameter in model.parameters()}) == ([torch.zeros(())], {None})
        for _ in range(count):
            reduce_step(strategy, plan, world.rank)
            found.append(state(model))
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        return found

    return work


def alone(plan: BatchPlan, *, norm: bool) -> list[dict[str, list[float]]]:
    one = BatchPlan(samples=plan.samples, micro_batch=plan.micro_batch, global_batch=plan.global_batch, workers=1)
    return steps(one, norm=norm)(World(torch.device("cpu")))


Together = list[dict[tuple[str, bool], list[dict[str, list[float]]]]]


@pytest.fixture(scope="module")
def together() -> Together:
    """What each of three workers has after its steps, by share and whether there is BatchNorm; one launch."""
    return run_on_each_rank(
        3,
        lambda world: {
            (share, norm): steps(plan, norm=norm)(world) for share, plan in SHARES.items() for norm in (False, True)
        },
    )


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("share", SHARES)
def test_workers_together_do_what_one_does(share: str, norm: bool, together: Together) -> None:
    expected = alone(SHARES[share], norm=norm)
    for rank, found in enumerate(together):
        for one, other in zip(found[share, norm], expected, strict=True):
            for name, value in other.items():
                assert one[name] == pytest.approx(value, rel=1e-12, abs=1e-14), f"rank {rank}: {name}"


def test_forward_leaves_buffers_to_the_end_of_the_step() -> None:
    """DDP would send those of rank 0 before each pass, once more and amid a step."""

    def work(world: World) -> float:
        model = network()
        strategy = DDP(model, world, CommunicationConfig())
        buffer = next(model.buffers())
        buffer.fill_(world.rank)
        seen: list[float] = []
        model.register_forward_pre_hook(lambda *_: seen.append(float(buffer[0])))
        strategy.begin_step(2)
        with strategy.accumulate(last=True):
            strategy.callable(torch.ones(3, 5, dtype=torch.float64))
        return seen[0]

    assert run_on_each_rank(2, work) == [0.0, 1.0]


def test_buffers_that_forward_replaces_stay_alike() -> None:
    class Replacing(torch.nn.Module):
        mean: torch.Tensor
        fresh: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = network()
            self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
            self.register_buffer("fresh", torch.tensor(True))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
            self.fresh = self.fresh & (inputs[0, 0] > 9)
            result: torch.Tensor = self.inner(inputs - self.mean)
            return result

    def work(world: World, share: str) -> dict[str, list[float]]:
        model = Replacing()
        strategy = DDP(model, world, CommunicationConfig()) if world.size > 1 else Single(model)
        for _ in range(2):
            reduce_step(strategy, replace(SHARES[share], workers=world.size), world.rank)
            model.zero_grad(set_to_none=True)
        check_replicas(model, world, 2)
        return {name: value.double().flatten().tolist() for name, value in model.named_buffers()}

    for share in ("uneven", "idle"):
        expected = work(World(torch.device("cpu")), share)
        assert expected["fresh"] == [0.0]
        for found in run_on_each_rank(3, partial(work, share=share)):
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-14), (share, name)


def test_a_closed_one_leaves_the_model_to_another_and_frees_its_buckets() -> None:
    def work(world: World) -> list[dict[str, list[float]]]:
        model, plan = network(), replace(SHARES["even"], workers=world.size)
        frozen, successor = next(iter(model.parameters())), Single(nn.Identity())
        found = []
        for learns in (True, False, True):
            frozen.requires_grad_(learns)
            strategy = DDP(model, world, CommunicationConfig()) if world.size > 1 else Single(model)
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                reduce_step(strategy, plan, world.rank)
            found.append({name: values for name, values in state(model).items() if "running" not in name})
            bucket = StorageWeakRef(model[0].bias.grad.untyped_storage())  # type: ignore[index]
            model.zero_grad(set_to_none=True)
            assert bucket.expired() == (world.size == 1), "gradients are views of DDP's buckets"
            assert strategy.follow_trained(lambda: successor) is successor
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters()), "none is watched any more"
            deadline = time.monotonic() + 10  # one of gloo's threads may have it in its hands for a moment
            while not bucket.expired():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return found

    expected = work(World(torch.device("cpu")))
    for found in run_on_each_rank(3, work):
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys()
            for name, value in other.items():
                assert one[name] == pytest.approx(value, rel=1e-12, abs=1e-14), name


def test_the_mean_over_workers_is_undone_in_the_loss() -> None:
    def refuse() -> torch.Tensor:
        raise AssertionError("where each of two adds the other's, the place in a bucket does not matter")

    def work(world: World) -> float:
        strategy = DDP(network(), world, CommunicationConfig())
        strategy.warm_up(refuse)
        return strategy.loss_factor

    assert run_on_each_rank(2, work) == [2.0, 2.0]


def test_gradients_travel_only_with_the_last_micro_batch() -> None:
    plan = BatchPlan(samples=24, micro_batch=2, global_batch=24, workers=2)

    def work(world: World) -> list[str]:
        model = network(norm=False)
        strategy = DDP(model, world, CommunicationConfig())
        seen: list[str] = []

        def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append("sent")
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        strategy._ddp.register_comm_hook(None, hook)
        original = strategy.after_backward

        def counted(number: int) -> None:
            seen.append(f"micro-batch {number}")
            original(number)

        strategy.after_backward = counted  # type: ignore[method-assign]
        reduce_step(strategy, plan, world.rank)
        return seen

    first, second = run_on_each_rank(2, work)
    assert first == [*(f"micro-batch {number}" for number in range(5)), "sent", "micro-batch 5"]
    assert second == [*(f"micro-batch {number}" for number in range(6, 11)), "sent", "micro-batch 11"]


def test_an_idle_worker_on_cuda_has_something_to_move_to_its_device() -> None:
    """With device_ids, as on CUDA, DDP moves its inputs and fails where there are none."""

    def work(world: World) -> list[float]:
        model = network(norm=False)
        strategy = DDP(model, world, CommunicationConfig())
        strategy._ddp.device_ids = [0]
        reduce_step(strategy, SHARES["idle"], world.rank)
        return state(model)["0.weight.grad"]

    expected = alone(SHARES["idle"], norm=False)[0]["0.weight.grad"]
    for found in run_on_each_rank(3, work):
        assert found == pytest.approx(expected, rel=1e-12)


def test_gradients_can_travel_as_fp16() -> None:
    plan = SHARES["uneven"]
    expected = alone(plan, norm=False)[0]
    compressed = run_on_each_rank(3, steps(plan, norm=False, count=1, grad_compression="fp16"))
    values = [value for [found] in compressed for value in found["0.weight.grad"]]
    assert values[: len(values) // 3] == values[len(values) // 3 : 2 * len(values) // 3]
    assert compressed[0][0]["0.weight.grad"] == pytest.approx(expected["0.weight.grad"], rel=1e-2, abs=1e-3)
    assert compressed[0][0]["0.weight.grad"] != pytest.approx(expected["0.weight.grad"], rel=1e-9)


@pytest.mark.parametrize("find", [False, True])
def test_a_parameter_that_a_step_skips(find: bool) -> None:
    """With --find-unused-parameters training goes on; without, DDP says which flag is missing."""

    class Sometimes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.used(inputs)
            return result

    def work(world: World) -> str:
        torch.manual_seed(1)
        model = Sometimes()
        strategy = DDP(model, world, CommunicationConfig(find_unused_parameters=find))
        try:
            for _ in range(2):
                reduce_step(strategy, BatchPlan(samples=8, micro_batch=2, global_batch=8, workers=2), world.rank)
        except RuntimeError as error:
            return "find_unused_parameters" if "find_unused_parameters" in str(error) else str(error)
        return "trained"

    assert run_on_each_rank(2, work) == (["trained"] * 2 if find else ["find_unused_parameters"] * 2)


class Branching(torch.nn.Module):
    """Its second branch takes part when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(5, 3).double(), torch.nn.Linear(5, 3).double()
        self.both = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(inputs)
        return result + self.second(inputs) if self.both else result


BRANCHES = [[1, 1, 0], [0, 0, 0], [0], [1], [0, 1, 0], [0], [0, 0, 0], [0, 0]]
"""Whether the second branch takes part, for each micro-batch of each step; where there are few, workers are idle."""


def branching(world: World, optimizer: str, kind: str) -> dict[str, list[float]]:
    """Weights after those steps."""
    model = Branching()
    wanted = CommunicationConfig(find_unused_parameters=True)
    strategy: Strategy = ExactReduction(model, world) if kind == "exact" else Single(model)
    if kind == "ddp" and world.size > 1:
        strategy = DDP(model, world, wanted)
    moved = build_optimizer(model, OptimizerConfig(name=optimizer, weight_decay=0.1))
    set_rate(moved, 0.05)
    inputs = torch.randn(30, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for step in BRANCHES:
        strategy.begin_step(len(step))
        mine = range(len(step) * world.rank // world.size, len(step) * (world.rank + 1) // world.size)
        for number in mine:
            model.both = bool(step[number])
            with strategy.accumulate(last=number == mine[-1]):
                loss = strategy.callable(inputs[number * 10 : number * 10 + 10]).square().sum()
                (loss * strategy.loss_factor / 10 / len(step)).backward()
            strategy.after_backward(number)
        strategy.reduce_gradients(idle=not mine)
        Precision("off", world.device).clip_and_step(moved, list(model.parameters()), 1.0)
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["ddp", "exact"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_branch_that_no_worker_used_is_left_alone_as_on_one_worker(workers: int, kind: str) -> None:
    """Neither weight decay nor momentum moves it, whether or not some workers are idle."""
    optimizers = ("sgd", "adamw")
    expected = [branching(World(torch.device("cpu")), optimizer, kind) for optimizer in optimizers]
    for found in run_on_each_rank(workers, lambda world: [branching(world, each, kind) for each in optimizers]):
        for one, other, optimizer in zip(found, expected, optimizers, strict=True):
            for name, value in other.items():
                assert one[name] == pytest.approx(value, rel=1e-11), f"{optimizer}: {name}"


def test_buckets_can_be_sized() -> None:
    def work(world: World) -> int:
        strategy = DDP(network(), world, CommunicationConfig(bucket_cap_mb=3))
        return int(strategy._ddp.bucket_bytes_cap)

    assert run_on_each_rank(2, work) == [3 * 1024 * 1024] * 2


def test_kernels_with_channels_last_travel_as_they_lie() -> None:
    """torch warns, and copies, where a gradient's strides are not its parameter's: also those of an idle worker."""

    def work(world: World) -> bool:
        torch.manual_seed(0)
        model = ConvNet((1, 8, 8), 3, width=4)
        assert use_channels_last(model)
        strategy = DDP(model, world, CommunicationConfig())
        for step in range(3):
            strategy.begin_step(2)
            idle = world.rank == step == 1
            if not idle:
                strategy.callable(torch.ones(4, 1, 8, 8)).sum().backward()
                strategy.after_backward(world.rank)
            strategy.reduce_gradients(idle=idle)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = None
        return True

    assert run_on_each_rank(2, work) == [True, True]


def test_a_compiled_network_comes_in_pieces_so_that_the_first_buckets_can_leave_early() -> None:
    """torch cuts it where DDP's buckets end if it is first called inside DDP; in one piece, all gradients come last."""

    def work(world: World) -> list[int]:
        pieces = []

        def compiler(graph: Any, inputs: Any) -> Any:
            pieces.append(len([node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]))
            return graph.forward

        model = CompiledModel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), None, backend=compiler)  # type: ignore[arg-type]
        model.full_batch_size = lambda: 8
        strategy = DDP(model, world, CommunicationConfig(bucket_cap_mb="1"))
        with strategy.accumulate(last=True):
            strategy.callable(torch.ones(8, 512)).sum().backward()
        return pieces

    [pieces] = run_on_each_rank(1, work)
    assert len(pieces) > 1


def test_unused_parameters_are_not_looked_for_in_an_object_without_tensors() -> None:
    """DDP would take all of them for unused."""

    class Opaque(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            return SimpleNamespace(loss=super().forward(inputs).mean())

    replica = Replica(Opaque(5, 3, bias=False), finds_unused=True)
    with pytest.raises(RequestError, match="finds no tensor in the SimpleNamespace"):
        replica(torch.ones(2, 5))
    assert Replica(Opaque(5, 3), finds_unused=False)(torch.ones(2, 5)).loss.ndim == 0
