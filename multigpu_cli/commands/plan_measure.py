"""What a plan rests on: the times and the memory of one worker, measured with the user's own model and data."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from multigpu_cli.config.pinned import forgotten, with_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import explicit_dump
from multigpu_cli.data.loader import Batch
from multigpu_cli.launch import run_workers
from multigpu_cli.optimizers import set_rate
from multigpu_cli.planning.memory import Memory, line_through
from multigpu_cli.planning.speedup import Work
from multigpu_cli.run.learner import Learner, build_learner
from multigpu_cli.run.rehearsal import rehearse
from multigpu_cli.run.settle import settle
from multigpu_cli.run.tracing import Traced, traced
from multigpu_cli.runtime.collectives import gathered, greatest
from multigpu_cli.runtime.determinism import seed_micro_batch
from multigpu_cli.runtime.devices import Choice, choose, cores, visible_gpus
from multigpu_cli.runtime.world import Rendezvous, World, joined
from multigpu_cli.tasks.sources import of_samples

_SECONDS, _WARM_UP = 3.0, 3
_WINDOW, _WINDOWS = 8, 8  # steps, and at most so many of them
_LONGEST_WAIT = 300.0  # seconds
_RESULT = "work.json"


@dataclass(frozen=True)
class Alone:
    """One worker, measured.

    Attributes:
        works: the times of one of so many workers. On a CPU that many were at work at once, as far as there are cores:
            they share its memory and its clock. On GPUs one stands for all.
        flops_per_sample: forward and backward.
        note: what the rehearsal changed.
    """

    learner: Learner
    works: dict[int, Work]
    memory: Memory
    flops_per_sample: float
    note: str


def threads_for(workers: int) -> int:
    """CPU threads that each of so many workers has; a lone one keeps what the user set."""
    return min(torch.get_num_threads(), cores()) if workers == 1 else max(1, cores() // workers)


def measured(config: Config, counts: list[int]) -> Alone:
    """Build the model on one device and take some steps; nothing stays of them.

    Raises:
        RequestError, TrainingError: as a training would.
    """
    of_samples(config, "a forecast")
    alone = replace(config.device, multi_gpu="none", nproc_per_node=None)
    choice = choose(alone, gpus=visible_gpus(), cpus=cores(), meeting=None)
    world = World(choice.devices[0])
    with tempfile.TemporaryDirectory(prefix="multigpu-plan-") as folder:
        own = with_settings(config, {"multi_gpu": "none", "nproc_per_node": None})
        learner, note = built(own, choice, world, folder)
        with closing(learner.train):
            size = learner.plan.batches.micro_batch
            whole, half = traced(learner, size), traced(learner, max(1, size // 2))
            works = {count: _work(learner, config, count) for count in counts if world.device.type == "cpu"}
            works = works or dict.fromkeys(counts, work_of(_steps(learner)[None], learner))
            return Alone(learner, works, _memory(learner, whole, half), whole.flops_per_sample, note)


def _work(learner: Learner, config: Config, workers: int) -> Work:
    """The times of one of so many CPU workers; beyond the cores, of one that has a core to itself."""
    if 1 < workers <= cores():
        return _crowded(config, workers)
    with with_threads(threads_for(workers)):
        return work_of(_steps(learner)[None], learner)


def _crowded(config: Config, workers: int) -> Work:
    """So many processes at once, each with its own micro-batches and no word between them."""
    with tempfile.TemporaryDirectory(prefix="multigpu-plan-") as folder:
        choice = Choice("ddp", (torch.device("cpu"),) * workers, workers, "plan")
        crowd(config, choice, "plan", Path(folder))
        return Work(**json.loads(Path(folder, _RESULT).read_text()))


def crowd(config: Config, choice: Choice, command: str, folder: Path) -> None:
    """Have this command's part done in several processes, which leave their results in the folder.

    Raises:
        WorkersFailed: some process ended with a non-zero exit code.
    """
    own = with_settings(forgotten(config, "gpu_ids"), {"multi_gpu": "ddp", "nproc_per_node": choice.launch})
    request = folder / "request.yaml"
    request.write_text(yaml.safe_dump(explicit_dump(replace(own, explicit=own.explicit | {"multi_gpu"}))))
    run_workers(choice, [command, "--config", str(request), "--results", str(folder)])


def take_part(config: Config, folder: Path, meeting: Rendezvous) -> None:
    """Be one of a crowd: begin together with the others, and let rank 0 write down what was found."""
    cpu = torch.device("cpu")
    with joined(meeting, cpu, timeout=_LONGEST_WAIT) as world, tempfile.TemporaryDirectory() as place:
        own = with_settings(config, {"multi_gpu": "none", "nproc_per_node": None})
        learner, _ = built(own, Choice("single", (cpu,), 0, "plan"), World(cpu), place)
        with closing(learner.train), with_threads(threads_for(world.size)):
            dist.barrier()
            mine = _steps(learner)
        least = -int(greatest(world, [-float(len(mine))])[0])
        everyone = torch.stack(gathered(world, mine[:least]))
        if world.main:
            (folder / _RESULT).write_text(json.dumps(asdict(work_of(everyone, learner))))


def typical(seen: Sequence[Alone]) -> Alone:
    """The medians of several measurements of the same."""
    works = {}
    for count, work in seen[-1].works.items():
        every = [asdict(alone.works[count]) for alone in seen]
        times = ("data", "forward", "backward", "commit")
        works[count] = replace(work, **{name: statistics.median(each[name] for each in every) for name in times})
    return replace(seen[-1], works=works)


def built(config: Config, choice: Choice, world: World, folder: str) -> tuple[Learner, str]:
    """What learns, rehearsed, and what the rehearsal changed; nothing is written into the folder."""
    settled = settle(with_settings(config, {"save_dir": folder, "resume": "never"}), choice, world)
    learner = build_learner(settled, choice, world)
    return learner, "; ".join(rehearse(learner))


@contextmanager
def with_threads(wanted: int) -> Iterator[None]:
    """So many CPU threads as long as the context lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def work_of(everyone: Tensor, learner: Learner) -> Work:
    """The mean times of some steps in a row, of those the ones that take the median time.

    Args:
        everyone: seconds of each phase, [workers, steps, 4]; workers that go in step wait for the slowest.
    """
    slowest = everyone.sum(2).argmax(0)
    steps = everyone[slowest, torch.arange(len(slowest))]
    windows = steps[: len(steps) // _WINDOW * _WINDOW].view(-1, _WINDOW, 4).mean(1)
    data, forward, backward, commit = windows[windows.sum(1).median(0).indices].tolist()
    return Work(data, forward, backward, commit, sum(p.nbytes for p in learner.trained))


def _steps(learner: Learner) -> Tensor:
    """The seconds of steps of one micro-batch each, with what the loop does around them, at rate zero: [steps, 4]."""
    device, kept, strategy = learner.world.device, learner.kept, learner.strategy
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    stream = micro_batches(learner)
    times: list[list[float]] = []
    set_rate(kept.optimizer, 0.0)
    began = time.perf_counter()
    while len(times) < _WARM_UP + _WINDOW or (
        len(times) < _WARM_UP + _WINDOW * _WINDOWS and time.perf_counter() < began + _SECONDS
    ):
        marks = [time.perf_counter()]

        def mark(marks: list[float] = marks) -> None:
            wait()
            marks.append(time.perf_counter())

        batch = next(stream)
        mark()
        strategy.begin(1)
        seed_micro_batch(0, len(times), batch.index, device)
        with learner.precision.autocast():
            loss = learner.task.loss_sum(strategy.callable, batch)
        mark()
        learner.precision.backward(loss, 1.0 / len(batch.indices))
        mark()
        strategy.micro_batch_done(batch.index)
        strategy.finish(idle=False)
        _, skipped = learner.precision.commit(kept.optimizer, learner.trained, 1.0)
        strategy.undo(skipped)
        mark()
        times.append([later - earlier for earlier, later in pairwise(marks)])
    return torch.tensor(times[_WARM_UP:], dtype=torch.float64)


def micro_batches(learner: Learner) -> Iterator[Batch]:
    """Those of this rank, epoch after epoch."""
    epoch = 0
    while True:
        for work in learner.train.epoch(learner.plan.batches, epoch, 0, learner.world.rank, 1):
            yield from work
        epoch += 1


def _memory(learner: Learner, whole: Traced, half: Traced) -> Memory:
    """Weights and buffers, gradients, the optimizer's state as it is after some steps, and what forward keeps."""
    model = learner.kept.model
    states = [value for state in learner.kept.optimizer.state.values() for value in state.values()]
    points = [(each.samples, float(each.activations)) for each in (half, whole)]
    fixed, slope = line_through(*points) if points[0][0] != points[1][0] else (0.0, points[1][1] / points[1][0])
    return Memory(
        weights=sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]),
        gradients=sum(p.nbytes for p in learner.trained),
        optimizer=sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
        fixed=fixed,
        per_sample=slope,
    )
