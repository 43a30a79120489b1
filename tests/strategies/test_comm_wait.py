import time
from itertools import count

import pytest
import torch
from torch import nn

from multigpu_cli.config.schema import CommunicationConfig
from multigpu_cli.distributed.world import World
from multigpu_cli.strategies.base import Single
from multigpu_cli.strategies.ddp import DDP, CommWait
from multigpu_cli.strategies.exact import ExactReduction
from tests.support.ranks import run_on_each_rank


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def test_whoever_is_early_waits_for_whoever_is_late() -> None:
    """Rank 1 is a fifth of a second late with each step."""

    def work(world: World) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for name, strategy in (
            ("ddp", DDP(network(), world, CommunicationConfig())),
            ("exact", ExactReduction(network(), world)),
        ):
            for _ in range(3):
                strategy.begin_step(2)
                time.sleep(0.2 * world.rank)
                with strategy.accumulate(last=True):
                    strategy.callable(torch.ones(4, 8)).sum().backward()
                strategy.after_backward(world.rank)
                strategy.reduce_gradients(idle=False)
            found[name] = strategy.read_comm_wait()
            assert strategy.read_comm_wait() is None, "nothing has happened since"
        return found

    early, late = run_on_each_rank(2, work)
    for name in ("ddp", "exact"):
        assert early[name] - late[name] == pytest.approx(0.2, abs=0.1)


def test_only_the_last_gradient_is_watched_after_the_first_step() -> None:
    model = network()
    watch = CommWait(list(model.parameters()), torch.device("cpu"))
    for _ in range(2):
        with watch:
            time.sleep(0.3)
            model(torch.ones(4, 8)).sum().backward()
            time.sleep(0.01)
    assert 0.01 <= (watch.read() or 0) < 0.2, "not what came before the last gradient"
    assert len(watch._hooks) == 1


def test_on_cuda_events_mark_the_wait_and_only_reading_waits_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, synchronized = count(start=1), []

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None:
            assert enable_timing
            self.at: int | None = None

        def record(self) -> None:
            self.at = next(clock) ** 2  # ms

        def synchronize(self) -> None:
            synchronized.append(self.at)

        def elapsed_time(self, ended: "Event") -> float:
            assert self.at is not None
            assert ended.at is not None
            return float(ended.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = CommWait([], torch.device("cuda", 0))
    for _ in range(3):
        with watch:
            assert not synchronized
    assert watch.read() == pytest.approx(((4 - 1) + (16 - 9) + (36 - 25)) / 3 / 1000)
    assert synchronized == [36], "the end of the last pair, after which all are over"


def test_alone_there_is_nothing_to_wait_for() -> None:
    assert Single(network()).read_comm_wait() is None
