"""DDP on two gloo workers: our step against raw DistributedDataParallel, and against what the hardware allows.

    python -m benchmarks.ddp

The MLP shows what we add to a short step (CPU time of all threads, both ranks): with the rivals in the same processes,
and with each in processes of its own, as trainings are, by wall time too. On two cores our ranks are pinned to
one each, and so are the rivals where they share the processes. The convnet at global batch 128 shows how much of the
communication hides behind backward (wall time): its bound is the greater of the same step without communication and of
one all-reduce of all gradients, as if the two overlapped perfectly.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.end_to_end import ready
from benchmarks.paired_timing import ONE_THREAD, STRETCH, Row, Seconds, program
from benchmarks.workloads import BATCH, MAX_NORM, MLP, PICTURES, SHAPE, adamw, against, mlp, one_step, shuffled, vectors
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.models.networks.convnet import ConvNet

WORKERS = 2
Rivals = dict[str, Callable[[], object]]
_SIDES: dict[str, tuple[bool, float | None]] = {  # of the MLP: fused, and the greatest norm of its gradient
    "raw": (True, MAX_NORM),
    "control": (True, MAX_NORM),
    "out of the box": (False, None),
}
_APART = 20, 10  # steps of a turn between processes, and those at its begin that find their caches taken


def measure(tiny: bool = False) -> list[Row]:
    turns = 8 if tiny else 50
    apart = [*_apart(turns, time.process_time, ""), *_apart(turns, time.perf_counter, " (wall)")]
    return [*_mlp(16 if tiny else 350), *apart, *_convnet(4 if tiny else 20, 16 if tiny else 128)]


def _mlp(turns: int) -> list[Row]:
    found = raced(partial(_run, "mlp", turns, BATCH))
    return [
        found.ratio("DDP, MLP: raw / itself (control)", "control", "raw"),
        found.micro("DDP, MLP: raw step, fused and clipped, both ranks", "raw"),
        found.ratio("DDP, MLP: ours at defaults / raw, both fused and clipped", "ours", "raw", aim=1.02),
        found.over("DDP, MLP: ours at defaults over raw, both ranks", "ours", "raw"),
        found.ratio("DDP, MLP: ours at defaults / raw out of the box", "ours", "out of the box", aim=0.87),
    ]


def _apart(turns: int, clock: Callable[[], float], note: str) -> list[Row]:
    store, sides = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False), ("ours", *_SIDES)
    batons = [Baton(store.port, place, len(sides)) for place in range(len(sides))]
    found = raced(
        *(partial(_run_apart, clock, *each, turns) for each in zip(sides, batons, strict=True)),
        joined=sum if clock is time.process_time else max,
    )
    name = f"DDP, MLP, each in its own processes{note}"
    return [
        found.ratio(f"{name}: raw / itself (control)", "control", "raw"),
        found.ratio(f"{name}: ours at defaults / raw, both fused and clipped", "ours", "raw", aim=1.02),
        found.ratio(f"{name}: ours at defaults / raw out of the box", "ours", "out of the box", aim=0.87),
    ]


def _convnet(turns: int, batch: int) -> list[Row]:
    found = raced(partial(_run, "convnet", turns, batch), joined=max)
    bound = list(map(max, found.of["compute"], found.of["all-reduce"]))
    found.of["bound"] = bound
    name = f"DDP, convnet, global batch {batch}"
    return [
        found.micro(f"{name}: the bound, a step (wall)", "bound"),
        found.ratio(f"{name}: bound / ours", "bound", "ours", aim=0.97, at_least=True),
        found.ratio(f"{name}: bound / raw DDP", "bound", "raw"),
    ]


def raced(*runs: Callable[[Path], Seconds], joined: Callable[[Iterable[float]], float] = sum) -> Seconds:
    """What each turn took both ranks together.

    Args:
        runs: what a rank does under torchrun's environment; it is told a folder, the same for both. Several have two
            processes each, all at once; a `Baton` says whose turn it is.
        joined: makes one figure of the ranks': the sum of CPU seconds, the slower one's of wall seconds.
    """
    together, context = Seconds(), get_context("spawn")
    with ExitStack() as stack:
        ranks = []
        for run in runs:
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pair = [context.Process(target=_rank, args=(rank, store.port, folder, run)) for rank in range(WORKERS)]
            ranks.append((store, folder, pair))
            for process in pair:
                process.start()
        for _, folder, pair in ranks:
            for process in pair:
                process.join()
            every = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]
            for side in every[0]:
                together.of[side] = list(map(joined, zip(*(one[side] for one in every), strict=True)))
    return together


class Baton:
    """Lets sides that have processes of their own take turns: each waits for both ranks of the one before."""

    def __init__(self, port: int, turn: int, sides: int) -> None:
        self._port, self._turn, self._sides = port, turn, sides

    def wait(self) -> None:
        if self._turn:
            self._store.wait([f"{self._turn - 1}-{rank}" for rank in range(WORKERS)])

    def pass_on(self) -> None:
        self._store.set(f"{self._turn}-{os.environ['RANK']}", "")
        self._turn += self._sides

    @cached_property
    def _store(self) -> dist.TCPStore:
        return dist.TCPStore("localhost", self._port)


def _rank(rank: int, port: int, folder: Path, run: Callable[[Path], Seconds]) -> None:
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORKERS, "LOCAL_WORLD_SIZE": WORKERS, "GROUP_RANK": 0}
    agent = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    told = places | agent | {"TORCHELASTIC_RUN_ID": "benchmark"}
    os.environ.update(ONE_THREAD | {name: str(value) for name, value in told.items()})
    (folder / f"{rank}.json").write_text(json.dumps(run(folder).of))
    os._exit(0)


class _Alone(Seconds):
    """Between its turns a side waits."""

    def turn(self, side: str, work: Callable[[], object]) -> None:
        work()


def _run_apart(clock: Callable[[], float], side: str, baton: Baton, turns: int, folder: Path) -> Seconds:
    if side == "ours":
        ours = _Alone(clock, *_APART)

        def wait() -> None:
            baton.pass_on()
            baton.wait()

        flags = MLP | {"batch_size": str(BATCH // WORKERS), "epochs": "1000", "max_steps": str(turns * ours.stretch)}
        return against({"others": wait}, flags, folder / "run", ours, LaunchEnv.current())
    seconds = Seconds(clock, *_APART)
    dist.init_process_group("gloo")
    step = _build_raw(*_SIDES[side])
    for _ in range(turns):
        baton.wait()
        seconds.turn(side, step)
        baton.pass_on()
    return seconds


def _run(job: str, turns: int, batch: int, folder: Path) -> Seconds:
    flags = {"mlp": MLP, "convnet": PICTURES | {"model": "convnet"}}[job]
    flags = flags | {"batch_size": str(batch // WORKERS), "epochs": "1000", "max_steps": str(turns * STRETCH)}
    seconds = Seconds(time.process_time if job == "mlp" else time.perf_counter)
    rivals = _short() if job == "mlp" else _long(batch // WORKERS)
    return against(rivals, flags, folder / "run", seconds, LaunchEnv.current())


def _raw(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def late(build: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """A rival that is built at its first step, when there is a process group."""
    built: list[Callable[[], None]] = []

    def step() -> None:
        if not built:
            built.append(build())
        built[0]()

    return step


def _short() -> Rivals:
    return {side: late(partial(_build_raw, *how)) for side, how in _SIDES.items()}


def _build_raw(fused: bool, max_norm: float | None) -> Callable[[], None]:
    model, data = mlp(), vectors("train")
    assert data is not None
    batches = shuffled(data, BATCH // WORKERS)
    return one_step(_raw(model), adamw(model, fused=fused), batches, max_norm=max_norm)


def _long(batch: int) -> Rivals:
    """The limit's parts in the fastest exact form: channels_last, fused."""

    def network() -> nn.Module:
        model: nn.Module = ConvNet(SHAPE, 10)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def stepping(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
        model = network()
        return one_step(wrap(model), adamw(model, fused=True), ready(batch, channels_last=True))

    gradients = torch.zeros(sum(p.numel() for p in network().parameters()))
    return {
        "raw": late(lambda: stepping(_raw)),
        "compute": late(lambda: stepping(lambda model: model)),
        "all-reduce": lambda: dist.all_reduce(gradients),
    }


if __name__ == "__main__":
    program(measure, __doc__)
