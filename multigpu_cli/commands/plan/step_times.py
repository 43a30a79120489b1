"""Times of the phases of optimizer steps, measured on the user's own model and data."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from multigpu_cli.commands.plan.group_timer import GroupTimer
from multigpu_cli.data.loader import Batch
from multigpu_cli.optimizers.build import set_rate
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.forward_backward import forward_backward
from multigpu_cli.runtime.collectives import all_reduce_max
from multigpu_cli.runtime.world import World

_SECONDS, _WARM_UP = 3.0, 3
_WINDOW, _WINDOWS = 8, 9  # steps, and at most so many windows of them
_PHASES = 4


def median_step(times: Tensor) -> list[float]:
    """The mean times of a window of steps: of all windows, the one that takes the median time.

    Args:
        times: seconds of each phase, then of each message, [workers, steps, 4 + messages]. Workers that step together
            wait for the slowest of them, which waits least itself: its times are those of the step.
    """
    slowest = times[..., :_PHASES].sum(2).argmax(0)
    steps = times[slowest, torch.arange(len(slowest))]
    windows = steps[: len(steps) // _WINDOW * _WINDOW].unflatten(0, (-1, _WINDOW)).mean(1)
    seconds: list[float] = windows[windows.sum(1).median(0).indices].tolist()
    return seconds


def time_steps(components: TrainComponents, world: World | None = None, messages: Sequence[Tensor] = ()) -> Tensor:
    """Some seconds of steps after a warm-up: [steps, 4 + messages]; all workers of the world take the same number.

    A sharded model has two messages of its own: the gathering of its weights, and the reduction of their gradients.
    The number of windows is odd, so that one of them takes the median time.
    """
    rows = _steps(components, world.size if world else 1, messages)
    times = list(islice(rows, _WARM_UP))
    began = time.perf_counter()
    for window in range(1, _WINDOWS + 1):
        times += islice(rows, _WINDOW)
        spent = time.perf_counter() - began
        spent = all_reduce_max(world, [spent])[0] if world else spent
        if window % 2 and spent > _SECONDS:
            break
    return torch.tensor(times[_WARM_UP:], dtype=torch.float64)


class _PhaseTimer:
    """Records when the phases of a step end on the device, less what `groups` has counted in them."""

    def __init__(self, device: torch.device, groups: GroupTimer | None) -> None:
        self._wait = torch.get_device_module(device).synchronize
        self._marks: list[float] = []
        self._groups = groups

    def mark(self) -> None:
        """Record the end of a phase."""
        self._wait()
        counted = self._groups.gathering + self._groups.reducing if self._groups else 0.0
        self._marks.append(time.perf_counter() - counted)

    def phase(self, name: str, batch: Batch | None = None) -> None:
        """Record the end of forward, which is where backward begins."""
        if name.endswith("backward"):
            self.mark()

    def backward_done(self, gradients: Callable[[], list[Tensor]]) -> None:
        """Record the end of backward."""
        self.mark()

    def read(self) -> list[float]:
        """Seconds between the marks since the last call."""
        marks, self._marks = self._marks, []
        return [later - earlier for earlier, later in pairwise(marks)]


def _steps(components: TrainComponents, workers: int, messages: Sequence[Tensor]) -> Iterator[list[float]]:
    """Take steps of one micro-batch each, as the training loop does, with a learning rate of zero.

    Args:
        workers: the number that share a step; with several, the changes of the buffers are gathered.
        messages: summed over the workers after backward.

    Yields:
        seconds of a step: data, forward, backward, commit, then each message.
    """
    state, strategy = components.state, components.strategy
    groups = GroupTimer(state.model) if strategy.sharded else None
    timer = _PhaseTimer(components.world.device, groups)
    stream = iterate_micro_batches(components)
    set_rate(state.optimizer, 0.0)
    while True:
        timer.mark()
        batch = next(stream)
        timer.mark()
        strategy.begin_step(workers)
        forward_backward(components, batch, len(batch.sample_indices), last=True, observer=timer)
        for message in messages:
            dist.all_reduce(message)
            timer.mark()
        strategy.after_backward(batch.micro_batch_index)
        strategy.reduce_gradients(idle=False)
        _, skipped = state.precision.clip_and_step(
            state.optimizer, components.trainable_parameters, 1.0, components.strategy.total_norm
        )
        strategy.rollback_buffers(skipped)
        timer.mark()
        data, forward, backward, *sent, commit = timer.read()
        yield [data, forward, backward, commit, *sent, *(groups.read() if groups else ())]


def iterate_micro_batches(components: TrainComponents) -> Iterator[Batch]:
    """This rank's micro-batches, epoch after epoch."""
    epoch = 0
    while True:
        for _, work in components.loaders.train.epoch(components.plan.batches, epoch, 0, components.world.rank, 1):
            yield from work
        epoch += 1
